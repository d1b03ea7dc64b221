"""A setup makes the instances of one environment of the recipe, and closes or pools them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard, runtime_checkable

from headrace.errors import UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.concurrency import is_failure
from headrace.services.env.environment import Claim, Environment, Named
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.tasks.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds that an environment has to close."""


class Setup(Protocol):
    """One environment of the recipe: makes its instances, and gets them back."""

    slots: EnvironmentSlots
    """Limits the instances that are open at once."""
    options: Mapping[str, Any]
    """The recipe's options."""
    store: ArtifactStore | None
    """The files of tasks and episodes. Without it, no files go in or come out."""

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """Return an environment for one attempt, not yet reset."""

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Get an environment back whose episode ended; `fit` says whether it may be reset."""

    async def close_pool(self) -> None:
        """Close the idle environments. The worker stops."""


@runtime_checkable
class Opening(Protocol):
    """A setup that must get ready before it can take episodes."""

    async def open(self) -> None:
        """Return once it is ready."""


@runtime_checkable
class Preparing(Protocol):
    """A setup whose episodes need something, such as an image, that may take long to get."""

    def prepared(
        self, use: EnvironmentUse, claim: Claim, resumed: bool
    ) -> AbstractAsyncContextManager[None]:
        """Hold what an episode needs, from before it gets a slot to its end.

        `resumed` says whether the episode was open before. The time counts against the episode's
        deadline, and not against its reset's time.
        """


@runtime_checkable
class Expecting(Protocol):
    """A setup that may use the time until a task starts."""

    expects: bool
    """Whether it does."""

    def expect(self, use: EnvironmentUse) -> None:
        """Note that a task was submitted. It may have started already."""


@runtime_checkable
class Sweeping(Protocol):
    """A setup whose sandboxes can be left over after a crash."""

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Remove the partition's sandboxes that no open episode needs.

        These are the ones whose reset's offset is at most `read_to` and whose attempt is not open.
        `open_attempt` returns the open attempt of a task and sample, or None.
        """


def is_preparing(setup: object) -> TypeGuard[Preparing]:
    """As `isinstance`, which takes 40 µs for such a protocol in Python 3.11."""
    return hasattr(setup, "prepared")


def is_named(environment: object) -> TypeGuard[Named]:
    """As `isinstance`, but faster."""
    return callable(getattr(environment, "set_name", None))


async def close_safely(close: Callable[[], Awaitable[None]], use: str) -> None:
    """Call an environment's `aclose` or `release`, which may fail and has CLOSE_S seconds."""
    own = asyncio.current_task()
    try:
        async with asyncio.timeout(CLOSE_S):
            await close()
    except TimeoutError:
        logger.warning("environment %s did not close within %s s", use, CLOSE_S)
    except BaseException as error:  # its own code: its failure to close harms no other
        if not is_failure(error, own):
            raise
        logger.exception("environment %s failed to close", use)


@dataclass(eq=False)
class EnvironmentSetup:
    """Makes environments that live in this process, and keeps a pool of persistent ones."""

    make: Callable[..., Environment]
    """The class of the environments, or a function that makes one, from its options."""
    options: Mapping[str, Any]
    slots: EnvironmentSlots
    namespace: str = "local"
    store: ArtifactStore | None = None
    pool: dict[str, list[Environment]] = field(default_factory=dict)
    """Idle persistent environments by their options, at most as many as there are slots. Those
    that were used last are at the end."""

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """Return a new environment, or in mode `persistent` an idle one with the same options.

        Raises UsageError if the task sets an option that only the recipe may set.
        """
        if use.mode == "persistent" and (idle := self.pool.get(use.options)):
            environment = idle.pop()
            if not idle:
                del self.pool[use.options]
        else:
            of_task = json.loads(use.options)
            if fixed := sorted(getattr(self.make, "recipe_only", frozenset()) & set(of_task)):
                raise UsageError(
                    f"a task can't set the options {fixed} of environment {use.use!r}; "
                    f"set them in the recipe, under environments.{use.use}.options"
                )
            environment = self.make(**{**self.options, **of_task})
        if is_named(environment):
            name = (self.namespace, claim.task, claim.sample, claim.attempt, claim.partition)
            environment.set_name(".".join(map(str, name)))
        return environment

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Pool a persistent environment that may be reset; close any other."""
        if use.mode == "persistent" and fit:
            self.pool[use.options] = [*self.pool.pop(use.options, ()), environment]
            if sum(map(len, self.pool.values())) <= self.slots.most:
                return
            oldest = next(iter(self.pool))
            environment = self.pool[oldest].pop(0)
            if not self.pool[oldest]:
                del self.pool[oldest]
        await close_safely(environment.aclose, use.use)

    async def close_pool(self) -> None:
        """Close the idle environments."""
        idle = [environment for pooled in self.pool.values() for environment in pooled]
        self.pool.clear()
        with suppress(TimeoutError):
            closing = (environment.aclose() for environment in idle)
            await asyncio.wait_for(asyncio.gather(*closing, return_exceptions=True), CLOSE_S)
