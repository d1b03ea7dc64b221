"""Score what an agent sent, with an environment that is made for this one action."""

from __future__ import annotations

import asyncio
import json

from headrace.errors import InfrastructureError
from headrace.schemas.events import ActionRequested, ObservationRecorded
from headrace.services.base.clock import now
from headrace.services.env.answers import answer_to, failed, failure_of
from headrace.services.env.environment import Claim, Environment, Judge
from headrace.services.env.setup import Setup


async def score(
    setup: Setup, action: ActionRequested, claim: Claim, instance: str
) -> ObservationRecorded:
    """Answer a `score` action by an environment that is a Judge."""
    async with setup.slots:
        began = now()
        fit = False
        environment: Environment | None = None
        try:
            environment = await setup.take(action.environment, claim)
            if not isinstance(environment, Judge):
                message = (
                    f"environment {action.environment.use!r} has no method `score`; "
                    f"name a judge in episode.score"
                )
                raise InfrastructureError("no_judge", message, retryable=False)
            left_s = max(0.0, action.expires_at / 1000 - now())
            async with asyncio.timeout(left_s):
                observation = await environment.score(json.loads(action.payload))
            run_ms = int((now() - began) * 1000)
            answer = answer_to(action, observation, instance, run_ms=run_ms)
            fit = True
        except Exception as error:  # as in Handle._act
            answer = failed(action, instance, failure_of(error))
        finally:
            if environment is not None:
                await setup.give_back(action.environment, environment, fit)
        return answer
