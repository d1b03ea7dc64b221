"""Open environments: a handle answers the actions of one attempt in the order of the log.

A handle waits for a slot and gets an environment from its setup. If the environment was open
before, the handle rebuilds it from the recorded actions. Then it answers one action after another.
It ends by `close`, by a newer attempt, by the episode's deadline, or with its partition. A
Resumable environment is not rebuilt but resumed, and stays open when the partition goes.

A score has no handle: an environment is made for this one action.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import EnvironmentFailed, InfrastructureError
from headrace.schemas.events import ActionRequested, Failure, ObservationRecorded
from headrace.services.base.clock import now
from headrace.services.base.types import STEP_TIMEOUT, TaskView
from headrace.services.env.answers import (
    Answer,
    alike,
    answer_to,
    deliver,
    failed,
    failure_of,
    infrastructure,
)
from headrace.services.env.environment import Claim, Environment, Judge, Resumable
from headrace.services.env.setup import Setup

logger = logging.getLogger(__name__)

History = Sequence[tuple[ActionRequested, ObservationRecorded]]


class Handle:
    """The environment of one attempt. `run` is its whole life; `put` adds actions."""

    def __init__(
        self,
        setup: Setup,
        reset: ActionRequested,
        answer: Answer,
        instance: str,
        claim: Claim,
        history: History = (),
        step_s: float | None = None,
    ) -> None:
        """`history` holds the actions answered before, with their recorded answers.

        `step_s` is the most seconds that a reset or a step may take. None: until the deadline.
        """
        self.attempt = reset.attempt
        self.expires_at = reset.expires_at / 1000
        self.task: asyncio.Task[None] | None = None
        self._setup = setup
        self._reset = reset
        self._answer = answer
        self._instance = instance
        self._claim = claim
        self._history = history
        self._step_s = step_s
        self._actions: asyncio.Queue[ActionRequested] = asyncio.Queue()
        self._done = history[-1][0].index if history else -1
        self._last = history[-1][1] if history else None
        self._first = {answer.call: answer for _, answer in history}
        """The answer that counts for each call: the first in the log, perhaps another worker's."""
        self._read = asyncio.Event()
        """Set whenever `_first` gets another answer."""
        self._broken: Failure | None = None
        self._over = False
        """Whether it has ended for every worker, and not only for this one."""

    def put(self, action: ActionRequested) -> None:
        """Add an action of this attempt. The caller keeps the order of the log."""
        self._actions.put_nowait(action)

    def on_recorded(self, answer: ObservationRecorded) -> None:
        """Note an answer of this attempt that is in the log, this worker's or another's."""
        self._first.setdefault(answer.call, answer)
        self._read.set()

    def end(self) -> None:
        """End it for good, for every worker."""
        self._over = True
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """Wait for a slot, then answer actions until the deadline or the task's cancellation."""
        async with self._setup.slots:
            environment: Environment | None = None
            fit = False
            try:
                async with asyncio.timeout(max(0.0, self.expires_at - now())):
                    while True:
                        idle = environment is not None and self._actions.empty()
                        fit = idle and self._broken is None
                        action = await self._actions.get()
                        fit = False
                        if environment is None and self._broken is None:
                            environment = await self._take()
                            if environment is not None:
                                await self._rebuild(environment)
                        await self._perform(environment, action)
            except TimeoutError:
                self._over = True
                logger.info("environment of task %d ended at its deadline", self._reset.task)
            finally:
                if isinstance(environment, Resumable) and not self._over:
                    await environment.release()
                elif environment is not None:
                    await self._setup.give_back(self._reset.environment, environment, fit)

    async def _take(self) -> Environment | None:
        """Get an environment, or note what went wrong."""
        try:
            return await self._setup.take(self._reset.environment, self._claim)
        except Exception as error:  # as in _act: making it runs an environment's own code
            self._broken = failure_of(error)
            return None

    async def _rebuild(self, environment: Environment) -> None:
        """Resume it, or repeat the recorded actions and note where an answer differs."""
        if self._history and isinstance(environment, Resumable):
            bound = asyncio.timeout(self._step_s)
            try:
                async with bound:
                    await environment.resume(_view(self._reset, self._setup.options), self._done)
            except Exception as error:  # as in _act: it may run an environment's own code
                self._broken = failure_of(self._late("resume") if bound.expired() else error)
            return
        if self._history and not environment.replayable:
            self._broken = infrastructure("sandbox_lost", "its worker is gone")
        for action, recorded in self._history:
            if self._broken is not None:
                return
            observation = await self._act(environment, action)
            if not alike(observation, recorded):
                message = (
                    f"action {action.index} gave another observation when it was repeated; "
                    f"make the environment deterministic, or set replayable = False"
                )
                self._broken = observation.failure or infrastructure("diverged", message)

    async def _perform(self, environment: Environment | None, action: ActionRequested) -> None:
        """Answer one action. A repeated action gets the last answer again."""
        if self._last is not None and action.call == self._last.call:
            await self._answer(self._last)
            return
        if action.index <= self._done:
            return
        if self._broken is None:
            await self._compare()
        if self._broken is None and action.index != self._done + 1:
            self._broken = infrastructure("sandbox_lost", f"action {self._done + 1} is missing")
        if self._broken is not None or environment is None:
            observation = failed(action, self._instance, self._broken)
        else:
            observation = await self._act(environment, action)
        self._done, self._last = action.index, observation
        self._last = await deliver(self._answer, action, observation)
        self._broken = self._broken or self._last.failure

    async def _compare(self) -> None:
        """Check that the last answer is the one that counts: the agent acts on that one.

        It waits only if this worker reads the log more slowly than the agent does.
        """
        last = self._last
        while last is not None and last.call not in self._first:
            self._read.clear()
            await self._read.wait()
        if last is not None and not alike(last, self._first[last.call]):
            self._broken = infrastructure("superseded", "another worker's answer came first")

    async def _act(self, environment: Environment, action: ActionRequested) -> ObservationRecorded:
        began = now()
        bound = asyncio.timeout(self._step_s)
        try:
            async with bound:
                if action.kind == "reset":
                    observation = await environment.reset(_view(action, self._setup.options))
                else:
                    observation = await environment.step(str(json.loads(action.payload)["action"]))
            run_ms = int((now() - began) * 1000)
            return answer_to(action, observation, self._instance, run_ms=run_ms)
        except Exception as error:  # an environment's own code: typed and retried
            self._broken = failure_of(self._late(action.kind) if bound.expired() else error)
            return failed(action, self._instance, self._broken)

    def _late(self, call: str) -> EnvironmentFailed:
        message = f"{call} took longer than step_s, {self._step_s:g} s"
        return EnvironmentFailed(STEP_TIMEOUT, message)


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


def _view(action: ActionRequested, options: Mapping[str, Any]) -> TaskView:
    return TaskView(
        number=action.task,
        sample=action.sample,
        payload=json.loads(action.payload),
        options={**options, **json.loads(action.environment.options)},
        seed=action.seed,
    )
