"""An environment of the recipe: where its instances come from, and where they go."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.errors import UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.env.environment import Claim, Environment, MakeEnvironment, Named

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds that an environment has to close."""


class Setup(Protocol):
    """An environment of the recipe: where its instances come from, and go."""

    slots: asyncio.Semaphore
    options: Mapping[str, Any]

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """An environment for one attempt, not yet reset."""

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Takes an environment that is over; `fit` to be reset or not."""

    async def close_pool(self) -> None:
        """Closes what is idle."""


@dataclass(eq=False)
class EnvironmentSetup:
    """Environments that live in this process: how they are made, their slots, and their pool."""

    make: MakeEnvironment
    options: Mapping[str, Any]
    slots: asyncio.Semaphore
    namespace: str = "local"
    pool: dict[str, list[Environment]] = field(default_factory=dict)
    """Idle persistent environments, by their options. Bounded by the slots."""

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """A fresh environment, or in mode `persistent` an idle one with the same options.

        UsageError where the task sets an option that is the recipe's alone.
        """
        if use.mode == "persistent" and (idle := self.pool.get(use.options)):
            environment = idle.pop()
        else:
            of_task = json.loads(use.options)
            if fixed := sorted(getattr(self.make, "recipe_only", frozenset()) & set(of_task)):
                raise UsageError(f"a task can't set the options {fixed}: the recipe alone can")
            environment = self.make(**{**self.options, **of_task})
        if isinstance(environment, Named):
            name = (self.namespace, claim.task, claim.sample, claim.attempt)
            environment.set_name(".".join(map(str, name)))
        return environment

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Pools a persistent environment that is fit to be reset; closes any other."""
        if use.mode == "persistent" and fit:
            self.pool.setdefault(use.options, []).append(environment)
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await environment.aclose()
        except TimeoutError:
            logger.warning("environment %s did not close in %s s", use.use, CLOSE_S)
        except Exception:  # an environment's own code: its failure to close harms no other
            logger.exception("environment %s failed to close", use.use)

    async def close_pool(self) -> None:
        """Closes the idle environments."""
        idle = [environment for pooled in self.pool.values() for environment in pooled]
        self.pool.clear()
        with suppress(TimeoutError):
            closing = (environment.aclose() for environment in idle)
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), CLOSE_S)
