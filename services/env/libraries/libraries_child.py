"""The child process that runs a library.

The first line from the worker is the setup, and each later line is a call. The answer to each is
one line. What the library prints goes to standard error.
"""

from __future__ import annotations

import inspect
import json
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol

from headrace.errors import EnvironmentFailed, UsageError
from headrace.services.base.plugins import load
from headrace.services.processes.pipes import take_pipes

LIBRARIES = {
    "reasoning_gym": "headrace.services.env.libraries.reasoning_gym_problems:Problems",
    "textarena": "headrace.services.env.libraries.textarena_games:Games",
}


class Library(Protocol):
    """The episodes of a library, by name. It is made once, from the recipe's options."""

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start an episode. `task` has `seed` and `payload`. Return fields of an Observation."""

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """Act in an episode. Raises KeyError if it isn't open."""

    def close(self, name: str) -> None:
        """Forget an episode."""


def main() -> None:
    """Serve until the worker ends this process."""
    calls, answers = take_pipes()
    signal.signal(signal.SIGALRM, _too_slow)
    setup = json.loads(calls.readline())
    most_bytes = setup["memory_mb"] * 2**20
    with suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library: Library | None = None

    def make() -> None:
        nonlocal library
        library = _make(setup["target"], setup["options"])

    answers.write(_answer(setup["make_s"], make))
    answers.flush()
    for line in calls:
        call = json.loads(line)
        ask = getattr(library, call.pop("verb"))
        answers.write(_answer(setup["call_s"], partial(ask, **call)))
        answers.flush()


def _answer(limit_s: float, call: Callable[[], Any]) -> bytes:
    """Return the line that says what a call returned, or the error that it raised."""
    try:
        # Real time: a library that sleeps is as slow as one that computes.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        answer = {"answer": call() or {}}
    except UsageError as error:
        answer = {"error": str(error), "kind": "usage"}
    except Exception as error:  # a library's own code: the parent raises it
        kind = error.code if isinstance(error, EnvironmentFailed) else type(error).__name__
        answer = {"error": str(error), "kind": kind}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return json.dumps(answer).encode() + b"\n"


def _make(target: str, options: Mapping[str, Any]) -> Library:
    library: Callable[..., Library] = load("library", target, LIBRARIES)
    try:
        inspect.signature(library).bind(**options)
    except TypeError as error:
        raise UsageError(f"options of {library.__name__}: {error}") from error
    return library(**options)


def _too_slow(*_: Any) -> NoReturn:
    raise EnvironmentFailed("too_slow", "the call took longer than its limit")


if __name__ == "__main__":
    main()
