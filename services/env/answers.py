"""Turn observations and errors of environments into the events that answer actions."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from numbers import Real
from pathlib import Path

from headrace.errors import (
    EnvironmentFailed,
    HeadraceError,
    InfrastructureError,
    TooLarge,
    UsageError,
)
from headrace.schemas.events import ActionRequested, Failure, ObservationRecorded
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.texts import encodable, message_of
from headrace.services.base.types import (
    ENVIRONMENT_ERROR,
    STEP_TIMEOUT,
    Observation,
    check_names,
)
from headrace.services.env.environment import AskingAgain
from headrace.services.tasks.artifact_store import Stored

logger = logging.getLogger(__name__)

LEFT_OUT = "left_out"
"""The key of an observation's `data` that says which files were not stored, and why."""
MOST_LEFT_OUT = 64
"""Most of them that an observation names."""
NOTHING_STORED = Stored()

Answer = Callable[[ObservationRecorded], Awaitable[object]]
"""Send an answer; return once it is durable."""


def answer_to(
    action: ActionRequested,
    observation: Observation,
    instance: str,
    *,
    run_ms: int = 0,
    failure: Failure | None = None,
    stored: Stored = NOTHING_STORED,
    partition: int = -1,
) -> ObservationRecorded:
    """Make the event that answers an action. Raises what `check_observation` raises.

    `stored` are the observation's files, which are in the blob store already. `partition` is where
    the environment gets its actions from; -1 if no environment stays open.
    """
    if stored.left_out:
        # An environment that left files out itself has said so.
        left_out = [*observation.data.get(LEFT_OUT, ()), *stored.left_out]
        said = {**observation.data, LEFT_OUT: left_out[:MOST_LEFT_OUT]}
        observation = replace(observation, data=said)
    data = check_observation(observation, action.kind)
    observed = ObservationRecorded(
        task=action.task,
        sample=action.sample,
        attempt=action.attempt,
        call=action.call,
        index=action.index,
        digest=action.digest,
        text=encodable(observation.text),
        data=data,
        reward=None if observation.reward is None else float(observation.reward),
        rewards={name: float(reward) for name, reward in observation.rewards.items()},
        terminated=observation.terminated,
        truncated=observation.truncated,
        artifacts=stored.artifacts,
        instance=instance,
        run_ms=run_ms,
        failure=failure,
        partition=partition,
    )
    # The log redacts it, too, but it must equal what the log will have: see `shown`.
    return REDACTOR.model(observed)


def check_observation(observation: Observation, method: str) -> str:
    """Return an observation's `data` as JSON. `method` is what returned it.

    Raises EnvironmentFailed if it is not an Observation, if a reward is not finite, if there are
    too many rewards, if a name of a reward is no text that UTF-8 can encode, or if `data` is not
    JSON.
    """
    if not isinstance(observation, Observation):
        given = "None" if observation is None else f"a {type(observation).__name__}"
        raise EnvironmentFailed(
            "no_observation", f"{method} returned {given}, but it must return an Observation"
        )
    if not isinstance(observation.text, str):
        kind = type(observation.text).__name__
        raise EnvironmentFailed("bad_observation", f"{method}: `text` is a {kind}, not a str")
    for name in observation.rewards:
        # It is refused and not changed, because two names could become equal.
        if not isinstance(name, str) or encodable(name) != name:
            message = f"{method}: {name!r} can't name a reward; use a str of valid Unicode"
            raise EnvironmentFailed("bad_observation", message)
    for name, reward in (("reward", observation.reward or 0.0), *observation.rewards.items()):
        if not isinstance(reward, Real):
            kind = type(reward).__name__
            raise EnvironmentFailed("bad_observation", f"{method}: {name} is a {kind}, not a float")
        if not math.isfinite(reward):
            raise EnvironmentFailed("not_finite", f"{method}: {name} is {reward}, not finite")
    for name, content in observation.artifacts.items():
        if not isinstance(name, str) or not isinstance(content, bytes | Path):
            kind = type(content).__name__
            message = f"{method}: the file {name!r} is a {kind}, not bytes or a Path"
            raise EnvironmentFailed("bad_observation", message)
    try:
        check_names(observation.rewards)
    except ValueError as error:
        raise EnvironmentFailed("too_large", f"{method}: the named rewards have {error}") from error
    try:
        return json.dumps(dict(observation.data), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EnvironmentFailed(
            "bad_observation", f"{method}: `data` is not JSON: {error}"
        ) from error


def failed(
    action: ActionRequested, instance: str, failure: Failure | None, partition: int = -1
) -> ObservationRecorded:
    """Make the event that answers an action with a failure: no text, no reward."""
    return answer_to(action, Observation(), instance, failure=failure, partition=partition)


async def deliver(
    answer: Answer, action: ActionRequested, observation: ObservationRecorded
) -> ObservationRecorded:
    """Send an answer and return it.

    If the answer is too large for a record, send and return a failure instead.
    """
    try:
        await answer(observation)
    except TooLarge as error:
        failure = Failure(origin="environment", code="too_large", message=str(error))
        observation = failed(action, observation.instance, failure, observation.partition)
        await answer(observation)
    return observation


def failure_of(error: BaseException) -> Failure:
    """Classify an exception of an environment. The environment is to blame by default.

    Whatever the exception is, a record can hold the failure.
    """
    try:
        if isinstance(error, HeadraceError) and (failure := _failure_said(error)) is not None:
            return failure
    except Exception as broken:  # its class is the user's: it may have no code, for example
        logger.warning("an exception of an environment can't be read: %s", message_of(broken))
    logger.error("an environment's code raised an exception", exc_info=error)
    return _environment(ENVIRONMENT_ERROR, message_of(error))


def _failure_said(error: HeadraceError) -> Failure | None:
    """Return what an exception says about who is to blame, if it does."""
    if isinstance(error, InfrastructureError):
        code, message = encodable(str(error.code)), encodable(str(error.message))
        return infrastructure(code, message, retryable=error.retryable)
    if isinstance(error, UsageError):  # a wrong recipe or task: another attempt would not help
        message = REDACTOR.text(encodable(str(error)), 1000)
        return Failure(origin="operator", code="unusable", message=message)
    if isinstance(error, EnvironmentFailed):
        return _environment(encodable(str(error.code)), encodable(str(error.message)))
    return None


def _environment(code: str, message: str) -> Failure:
    message = REDACTOR.text(message, 1000)
    return Failure(origin="environment", code=code, message=message, retryable=True)


def too_late(call: str, step_s: float | None, environment: object) -> HeadraceError:
    """Make the exception for a call that `step_s` has ended. A busy server is to blame itself."""
    if isinstance(environment, AskingAgain) and environment.busy is not None:
        return environment.busy
    return EnvironmentFailed(STEP_TIMEOUT, f"{call} took longer than step_s, {step_s:g} s")


def infrastructure(code: str, message: str, *, retryable: bool = True) -> Failure:
    """Make a failure that neither the policy nor the environment caused."""
    return Failure(origin="infrastructure", code=code, message=message, retryable=retryable)
