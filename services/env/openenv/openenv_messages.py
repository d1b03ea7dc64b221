"""Messages of an OpenEnv session, and how observations become text.

They follow `openenv.core.env_server` of openenv 0.10: a server at `/ws` answers each `reset` and
`step` with an `observation`, or with an `error` that has one of the codes below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from headrace.errors import EnvironmentFailed, UsageError
from headrace.services.base.json_text import load_json
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.types import Observation
from headrace.services.env.http_environment import Busy, bad_answer

REFUSAL_CHARACTERS = 2000
"""Most characters of a server's complaint about an action that the policy reads."""


class BadAction(ValueError):
    """The policy's text is not an action. The policy reads the message."""


class OpenEnvProblem(BaseModel):
    """One problem that pydantic found in an action. Servers read actions with pydantic."""

    type: str = ""
    loc: list[str | int] = []
    """Where it is: the action's field first. Empty if the problem is in no field."""
    msg: str = ""


class Refused(Exception):
    """The server refused an action and did nothing. The message says why."""

    def __init__(self, problems: Sequence[OpenEnvProblem]) -> None:
        lines = (f"{'.'.join(map(str, each.loc))}: {each.msg}" for each in problems)
        super().__init__(REDACTOR.text("; ".join(lines), REFUSAL_CHARACTERS))
        self.problems = problems


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    data: dict[str, JsonValue]


class _Error(BaseModel):
    code: str = ""
    message: str = ""
    errors: list[OpenEnvProblem] = []


class Step(BaseModel):
    """A server's answer to a reset or a step. Unknown keys are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    observation: dict[str, JsonValue]
    reward: float | bool | None = None
    done: bool = False

    def to_observation(self, text: str) -> Observation:
        """Return what the agent gets: `text`, and the server's whole observation as `data`."""
        reward = None if self.reward is None else float(self.reward)
        return Observation(text=text, data=self.observation, reward=reward, terminated=self.done)


def read_step(content: str, url: str) -> Step:
    """Read the observation in a server's message.

    Raises Refused if the server refused the action, EnvironmentFailed `bad_answer` if the message
    does not follow the protocol, and otherwise the error that the message reports.
    """
    try:
        message = _Message.model_validate_json(content)
        if message.type == "observation":
            return Step.model_validate(message.data)
        if message.type != "error":
            complaint = f"{url} answered with a message of unknown type {message.type[:80]!r}"
            raise EnvironmentFailed("bad_answer", complaint)
        error = _Error.model_validate(message.data)
    except ValidationError as problems:
        raise bad_answer(problems, url) from problems
    if error.code == "VALIDATION_ERROR" and error.errors:
        raise Refused(error.errors)
    text = f"{url}: {error.code}: {error.message}"
    if error.code == "CAPACITY_REACHED":
        raise Busy(text)
    raise EnvironmentFailed("server_error", text)


def read_object(action: str) -> dict[str, Any]:
    """Read an action that the policy wrote as a JSON object. Raises BadAction if it is not one."""
    try:
        fields = load_json(action)
    except ValueError as error:
        raise BadAction(f"an action must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadAction("an action must be a JSON object")
    return fields


def render(observation: Mapping[str, JsonValue], names: Sequence[str]) -> str:
    """Turn an observation into text: the named fields, or all of it if no field is named.

    Fields are looked up in the observation first, then in its metadata. Several fields are shown
    with their names, without empty ones. Raises UsageError if it has none of the fields.
    """
    metadata = observation.get("metadata")
    inner = metadata if isinstance(metadata, dict) else {}
    outer = {name: value for name, value in observation.items() if name != "metadata"}
    if not names:
        whole = outer or inner
        return as_text(whole) if whole else ""
    fields = {**inner, **outer}
    found = {name: fields[name] for name in names if name in fields}
    if not found:
        raise UsageError(
            f"render {list(names)}: the observation has none of these fields; "
            f"it has {', '.join(fields) or 'nothing'}"
        )
    if len(names) == 1:
        return as_text(next(iter(found.values())))
    shown = {name: value for name, value in found.items() if value not in (None, "", [], {})}
    return "\n".join(f"{name}: {as_text(value)}" for name, value in shown.items())


def as_text(value: JsonValue) -> str:
    """Return a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
