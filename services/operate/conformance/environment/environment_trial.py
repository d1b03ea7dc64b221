"""One class of environments under trial, and what the rules share."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.errors import EnvironmentFailed, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.answers import check_observation
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.setup import CLOSE_S, Opening, Setup, is_preparing
from headrace.services.operate.conformance.conformance_report import NotChecked, Violation

T = TypeVar("T")

KEY = "tried"
"""The environment's key in the recipe of the trial."""
USE = EnvironmentUse(use=KEY)
SEED = 7


class RaisedByPlugIn(Violation):
    """A call raised an exception that it should not raise."""


@dataclass(frozen=True)
class Played:
    """What came out of one episode."""

    observations: tuple[Observation, ...]
    """That of the reset, then one for each step."""

    @property
    def ended(self) -> bool:
        """Whether the environment said that the episode is over."""
        return self.observations[-1].done

    @property
    def shown(self) -> tuple[str, ...]:
        """What an agent sees of each observation. Equal texts mean no difference."""
        return tuple(shown_text(one) for one in self.observations)


@dataclass(eq=False)
class EnvironmentTrial:
    """Makes environments, and plays episodes of the same task with the same actions."""

    setup: Setup
    payload: Mapping[str, Any]
    actions: Sequence[str]
    """What the agent does, again from the first one after the last."""
    steps: int
    """Most steps of an episode."""
    call_s: float
    """Most seconds of a call."""
    blocked_s: float
    """Most seconds for which the asyncio loop may be blocked."""
    persistent: bool = False
    """Whether instances must take another reset."""
    score: Mapping[str, Any] | None = None
    """What a judge gets."""
    namespace: str = "conformance"
    """The first part of the names of environments. Each run of the kit has another one."""
    _opened: bool = False
    _unmade: str = ""
    """Why no environment can be made."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def task(self, sample: int = 0, seed: int = SEED) -> TaskView:
        """Returns a sample of the task."""
        return TaskView(0, sample, self.payload, self.setup.options, seed)

    @asynccontextmanager
    async def environment(self, closing: bool = True) -> AsyncIterator[Environment]:
        """Makes an environment as a worker does, and closes it, unless `closing` is False."""
        async with AsyncExitStack() as stack:
            environment = await self._make(stack)
            try:
                yield environment
            finally:
                if closing:
                    await self.close(environment)

    async def _make(self, stack: AsyncExitStack) -> Environment:
        """Raises Violation if it fails for the first time, and NotChecked after that."""
        if self._unmade:
            raise NotChecked(f"no environment can be made: {self._unmade}")
        number = next(self._numbers)
        claim = Claim(number, 0, 0, 0, number, time.time() + 3600)
        try:
            if not self._opened and isinstance(self.setup, Opening):
                await self.setup.open()
            self._opened = True
            if is_preparing(self.setup):
                await stack.enter_async_context(self.setup.prepared(USE, claim, False))
            return await self.setup.take(USE, claim)
        except Exception as error:  # as in `call`
            self._unmade = f"{type(error).__name__}: {error}"
            raise Violation(f"no environment can be made: {self._unmade}") from error

    async def close(self, environment: Environment) -> None:
        """Closes an environment in the time that a worker gives it."""
        await self.call(environment.aclose(), "aclose", CLOSE_S)

    async def call(self, work: Awaitable[T], name: str, limit_s: float | None = None) -> T:
        """Awaits a call. Raises Violation if it raises something, or takes too long."""
        limit_s = self.call_s if limit_s is None else limit_s
        bound = asyncio.timeout(limit_s)
        try:
            async with bound:
                return await work
        except (UsageError, Violation):
            raise
        except Exception as error:  # a user's own code may raise anything
            if bound.expired():
                raise Violation(f"{name} did not return within {limit_s:g} s") from error
            raise RaisedByPlugIn(f"{name} raised {type(error).__name__}: {error}") from error

    async def observe(self, work: Awaitable[Any], name: str) -> Observation:
        """Awaits a call and returns its observation. Raises Violation if it is not a valid one."""
        found = await self.call(work, name)
        try:
            check_observation(found, name)
        except EnvironmentFailed as error:
            raise Violation(error.message) from error
        assert isinstance(found, Observation)
        return found

    async def play(
        self,
        environment: Environment,
        *,
        seed: int = SEED,
        most: int | None = None,
        done: int = 0,
    ) -> Played:
        """Resets an environment and plays at most `most` steps.

        With `done`, no reset is done: the first so many steps were done before. Another episode may
        do something between two calls.
        """
        most = self.steps if most is None else most
        observations: list[Observation] = []
        if not done:
            task = self.task(seed=seed)
            observations.append(await self.observe(environment.reset(task), "reset"))
        for number in range(done, most):
            if observations and observations[-1].done:
                break
            await asyncio.sleep(0)
            action = self.actions[number % len(self.actions)]
            observations.append(
                await self.observe(environment.step(action), f"step {number + 1} ({action!r:.40})")
            )
        return Played(tuple(observations))

    async def played(self, seed: int = SEED) -> Played:
        """Plays one episode in an environment of its own."""
        async with self.environment() as environment:
            return await self.play(environment, seed=seed)

    async def require_replayable(self) -> None:
        """Raises NotChecked if the environment does not promise to repeat itself."""
        async with self.environment() as environment:
            if not environment.replayable:
                raise NotChecked("the environment says `replayable = False`")


def shown_text(observation: Observation) -> str:
    """Returns what an agent sees of an observation, as a text to compare and to show."""
    return json.dumps(
        {
            "text": observation.text,
            "data": dict(observation.data),
            "reward": observation.reward,
            "rewards": dict(observation.rewards),
            "terminated": observation.terminated,
            "truncated": observation.truncated,
        },
        sort_keys=True,
    )


def require_same(one: Sequence[str], other: Sequence[str], what: str) -> None:
    """Raises Violation if two episodes show different things. `what` says which they are."""
    for number, (first, second) in enumerate(itertools.zip_longest(one, other)):
        if first != second:
            where = "the reset" if number == 0 else f"step {number}"
            raise Violation(f"{what} differ at {where}: {first!s:.120} and {second!s:.120}")
