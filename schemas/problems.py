"""Says in words what is wrong with data that pydantic refused."""

from __future__ import annotations

from pydantic import ValidationError


def problems_of(error: ValidationError, whole: str = "") -> list[str]:
    """Returns a text for each problem: its key, and what the value must be.

    `whole` is what to call the data if a problem has no key.
    """
    problems = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        key = ".".join(map(str, problem["loc"])) or whole
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "no such key"
        problems.append(f"{key}: {message}" if key else message)
    return problems
