"""Has a judge answer for a score: an environment for one action alone."""

from __future__ import annotations

import asyncio
import json

from headrace.errors import InfrastructureError
from headrace.schemas.events import ActionRequested, ObservationRecorded
from headrace.services.base.clock import now
from headrace.services.base.types import Observation
from headrace.services.env.answers import answer_to, failure_of
from headrace.services.env.environment import Claim, Environment, Judge
from headrace.services.env.setup import Setup


async def score(
    setup: Setup, action: ActionRequested, claim: Claim, instance: str
) -> ObservationRecorded:
    """Answers a `score` action by an environment that is a Judge."""
    async with setup.slots:
        began = now()
        fit = False
        environment: Environment | None = None
        try:
            environment = await setup.take(action.environment, claim)
            if not isinstance(environment, Judge):
                raise InfrastructureError("no_judge", "it has no score()", retryable=False)
            left_s = max(0.0, action.expires_at / 1000 - now())
            payload = json.loads(action.payload)
            async with asyncio.timeout(left_s):
                observation = await environment.score(payload)
            run_ms = int((now() - began) * 1000)
            answer = answer_to(action, observation, instance, run_ms=run_ms)
            fit = True
        except Exception as error:  # as in Handle._act
            answer = answer_to(action, Observation(), instance, failure=failure_of(error))
        finally:
            if environment is not None:
                await setup.give_back(action.environment, environment, fit)
        return answer
