"""What an environment says, as the events that answer actions; and whose doing its errors are."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable

from headrace.errors import EnvironmentFailed, InfrastructureError, TooLarge, UsageError
from headrace.schemas.events import ActionRequested, Failure, ObservationRecorded
from headrace.services.base.types import Observation

logger = logging.getLogger(__name__)

Answer = Callable[[ObservationRecorded], Awaitable[object]]


def answer_to(
    action: ActionRequested,
    observation: Observation,
    instance: str,
    *,
    run_ms: int = 0,
    failure: Failure | None = None,
) -> ObservationRecorded:
    """The event that answers an action. An error where it holds what is no number, or no JSON."""
    data = json.dumps(dict(observation.data), sort_keys=True, allow_nan=False)
    for reward in (observation.reward or 0.0, *observation.rewards.values()):
        if not math.isfinite(reward):
            raise EnvironmentFailed("not_finite", f"a reward is {reward}")
    return ObservationRecorded(
        task=action.task,
        sample=action.sample,
        attempt=action.attempt,
        call=action.call,
        index=action.index,
        digest=action.digest,
        text=observation.text,
        data=data,
        reward=observation.reward,
        rewards=dict(observation.rewards),
        terminated=observation.terminated,
        truncated=observation.truncated,
        instance=instance,
        run_ms=run_ms,
        failure=failure,
    )


async def deliver(
    answer: Answer, action: ActionRequested, observation: ObservationRecorded
) -> ObservationRecorded:
    """Sends an answer; one that no record can hold becomes a failure. Returns what was sent."""
    try:
        await answer(observation)
    except TooLarge as error:
        failure = Failure(origin="environment", code="too_large", message=str(error))
        observation = answer_to(action, Observation(), observation.instance, failure=failure)
        await answer(observation)
    return observation


def alike(one: ObservationRecorded, other: ObservationRecorded) -> bool:
    """Whether two answers tell an agent the same."""
    aside = {"instance": "", "run_ms": 0}
    return one.model_copy(update=aside) == other.model_copy(update=aside)


def failure_of(error: Exception) -> Failure:
    """Whose doing an environment's error is: its own, unless it says otherwise."""
    if isinstance(error, InfrastructureError):
        return infrastructure(error.code, error.message, retryable=error.retryable)
    if isinstance(error, UsageError):  # a wrong recipe: trying again would not help
        return Failure(origin="operator", code="unusable", message=str(error)[:1000])
    if isinstance(error, EnvironmentFailed):
        message = error.message[:1000]
        return Failure(origin="environment", code=error.code, message=message, retryable=True)
    logger.error("an environment's code failed", exc_info=error)
    message = f"{type(error).__name__}: {error}"[:1000]
    return Failure(origin="environment", code="environment_error", message=message, retryable=True)


def infrastructure(code: str, message: str, *, retryable: bool = True) -> Failure:
    """What failed through nobody's code."""
    return Failure(origin="infrastructure", code=code, message=message, retryable=retryable)
