"""What goes over an OpenEnv session: messages, their answers, and what both say as text.

After `openenv.core.env_server` of openenv 0.10: a server at `/ws` answers each `reset` and `step`
by an `observation` or an `error` with one of the codes below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.base.types import Observation

REFUSAL_CHARACTERS = 2000
"""Of what a server finds wrong with an action: as much is told."""


class BadAction(ValueError):
    """What a policy wrote is no action: it is told."""


class OpenEnvProblem(BaseModel):
    """One thing that pydantic, by which servers read actions, finds wrong."""

    type: str = ""
    loc: list[str | int] = []
    msg: str = ""

    @property
    def field(self) -> str:
        """The action's field that it is about; empty where it is about none."""
        return str(self.loc[0]) if self.loc else ""


class Refused(Exception):
    """The server takes no such action; nothing was done. Its message says why."""

    def __init__(self, problems: Sequence[OpenEnvProblem]) -> None:
        said = (f"{'.'.join(map(str, each.loc))}: {each.msg}" for each in problems)
        super().__init__("; ".join(said)[:REFUSAL_CHARACTERS])
        self.problems = problems


class Full(InfrastructureError):
    """The server holds as many sessions as it may."""


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str
    data: dict[str, JsonValue]


class _Error(BaseModel):
    code: str = ""
    message: str = ""
    errors: list[OpenEnvProblem] = []


class Step(BaseModel):
    """What a server answers to a reset and a step. Keys that are new to it are passed over."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    observation: dict[str, JsonValue]
    reward: float | bool | None = None
    done: bool = False

    def told(self, text: str) -> Observation:
        """As the agent gets it: `text`, and all that the server says as `data`."""
        reward = None if self.reward is None else float(self.reward)
        return Observation(text=text, data=self.observation, reward=reward, terminated=self.done)


def read_step(content: str, where: str) -> Step:
    """The observation in a server's message.

    Refused where it says that the action is none; else the error that it tells, typed, or
    EnvironmentFailed `bad_answer` where it is no message of the protocol.
    """
    try:
        message = _Message.model_validate_json(content)
        if message.type == "observation":
            return Step.model_validate(message.data)
        if message.type != "error":
            said = f"{where} answers with a message of type {message.type[:80]!r}"
            raise EnvironmentFailed("bad_answer", said)
        error = _Error.model_validate(message.data)
    except ValidationError as problems:
        problem = problems.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the message"
        said = f"{where} answers what is no observation: {place}: {problem['msg']}"
        raise EnvironmentFailed("bad_answer", said) from problems
    raise _typed(error, where)


def _typed(error: _Error, where: str) -> Exception:
    """Whose doing it is."""
    said = f"{where}: {error.code}: {error.message}"
    if error.code == "CAPACITY_REACHED":
        return Full("server_busy", said)
    if error.code == "VALIDATION_ERROR" and error.errors:
        return Refused(error.errors)
    return EnvironmentFailed("server_error", said)


def read_object(action: str) -> dict[str, Any]:
    """An action that a policy wrote as JSON. BadAction where it is no object."""
    try:
        fields = json.loads(action)
    except (ValueError, RecursionError) as error:
        raise BadAction(f"an action must be JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadAction("an action must be a JSON object")
    return fields


def render(observation: Mapping[str, JsonValue], names: Sequence[str]) -> str:
    """An observation as text: the fields of these names, or with none the whole of it.

    A field is looked for in the observation, then in its metadata. Of several each says its name,
    and what is empty is left out. UsageError where there is none of them.
    """
    metadata = observation.get("metadata")
    inner = metadata if isinstance(metadata, dict) else {}
    outer = {name: value for name, value in observation.items() if name != "metadata"}
    if not names:
        whole = outer or inner
        return _spelt(whole) if whole else ""
    fields = {**inner, **outer}
    found = {name: fields[name] for name in names if name in fields}
    if not found:
        has = ", ".join(fields) or "nothing"
        raise UsageError(f"render {list(names)}: an observation has none of it; it has {has}")
    if len(names) == 1:
        return _spelt(next(iter(found.values())))
    told = {name: value for name, value in found.items() if value not in (None, "", [], {})}
    return "\n".join(f"{name}: {_spelt(value)}" for name, value in told.items())


def _spelt(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
