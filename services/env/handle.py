"""One open environment: its actions in order, its answers, and its end.

A handle waits for a slot, makes (or takes from the pool) its environment, rebuilds it from the
recorded actions where it was open before, then answers one action after another. It ends by
`close`, by a newer attempt, by the episode's deadline, or with its partition. What outlives its
worker (a Lasting environment) is not rebuilt but found again, and left alone with its partition.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.schemas.events import ActionRequested, Failure, ObservationRecorded
from headrace.services.base.clock import now
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.answers import (
    Answer,
    alike,
    answer_to,
    deliver,
    failure_of,
    infrastructure,
)
from headrace.services.env.environment import Claim, Environment, Resumable
from headrace.services.env.setup import Setup

logger = logging.getLogger(__name__)

History = Sequence[tuple[ActionRequested, ObservationRecorded]]


class Handle:
    """One attempt's environment. `run` is its life; `put` feeds it."""

    def __init__(
        self,
        setup: Setup,
        reset: ActionRequested,
        answer: Answer,
        instance: str,
        claim: Claim,
        history: History = (),
    ) -> None:
        """`history` holds the actions that were answered before, with the recorded answers."""
        self.attempt = reset.attempt
        self.expires_at = reset.expires_at / 1000
        self.task: asyncio.Task[None] | None = None
        self._setup = setup
        self._reset = reset
        self._answer = answer
        self._instance = instance
        self._claim = claim
        self._history = history
        self._actions: asyncio.Queue[ActionRequested] = asyncio.Queue()
        self._done = -1
        self._last: ObservationRecorded | None = None
        self._first: dict[str, ObservationRecorded] = {}
        """Of each call the answer that counts: the first in the log, perhaps another worker's."""
        self._read = asyncio.Event()
        """Set whenever one more is known."""
        self._broken: Failure | None = None
        self._over = False
        """By the log: closed, or a newer attempt has begun. It is no one's any more."""

    def put(self, action: ActionRequested) -> None:
        """Takes an action of this attempt, in the order of the log."""
        self._actions.put_nowait(action)

    def on_recorded(self, answer: ObservationRecorded) -> None:
        """Takes an answer of this attempt from the log: one's own, or another worker's."""
        self._first.setdefault(answer.call, answer)
        self._read.set()

    def end(self) -> None:
        """Ends it for good, whoever may own its partition."""
        self._over = True
        if self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        """From the slot to the deadline, or to its cancellation."""
        async with self._setup.slots:
            environment: Environment | None = None
            fit = False
            try:
                async with asyncio.timeout(max(0.0, self.expires_at - now())):
                    while True:
                        fit = environment is not None and self._actions.empty()
                        action = await self._actions.get()
                        fit = False
                        if environment is None and self._broken is None:
                            environment = await self._take()
                            if environment is not None:
                                await self._rebuild(environment)
                        await self._perform(environment, action)
            except TimeoutError:
                self._over = True
                logger.info("environment of task %d: deadline", self._reset.task)
            finally:
                if isinstance(environment, Resumable) and not self._over:
                    await environment.release()
                elif environment is not None:
                    await self._setup.give_back(self._reset.environment, environment, fit)

    async def _take(self) -> Environment | None:
        """Makes the environment, or notes what went wrong."""
        try:
            return await self._setup.take(self._reset.environment, self._claim)
        except Exception as error:  # as in _act: making it runs an environment's own code
            self._broken = failure_of(error)
            return None

    async def _rebuild(self, environment: Environment) -> None:
        """Has it do again what was recorded; notes where it differs. Finds a lasting one again."""
        if self._history and isinstance(environment, Resumable):
            await self._find(environment)
            return
        if self._history and not environment.replayable:
            self._broken = infrastructure("sandbox_lost", "its worker is gone")
        for action, recorded in self._history:
            if self._broken is not None:
                break
            observation = await self._act(environment, action)
            if not alike(observation, recorded):
                message = f"action {action.index} was answered otherwise when it was recorded"
                self._broken = observation.failure or infrastructure("diverged", message)
            self._done, self._last = action.index, recorded
            self.on_recorded(recorded)

    async def _find(self, environment: Resumable) -> None:
        """Has it be as it was after the last recorded action."""
        last, recorded = self._history[-1]
        try:
            await environment.resume(_view(self._reset, self._setup.options), last.index)
        except Exception as error:  # as in _act: a tool of the user's own may be made again
            self._broken = failure_of(error)
        self._done, self._last = last.index, recorded
        for _, answer in self._history:
            self.on_recorded(answer)

    async def _perform(self, environment: Environment | None, action: ActionRequested) -> None:
        """Answers one action: again from the last answer where it is a repetition."""
        if self._last is not None and action.call == self._last.call:
            await self._answer(self._last)
            return
        if action.index <= self._done:
            return
        if self._broken is None:
            await self._compare()
        if self._broken is None and action.index != self._done + 1:
            self._broken = infrastructure("sandbox_lost", f"no action {self._done + 1}")
        if self._broken is not None or environment is None:
            observation = answer_to(action, Observation(), self._instance, failure=self._broken)
        else:
            observation = await self._act(environment, action)
        self._done, self._last = action.index, observation
        self._last = await deliver(self._answer, action, observation)
        self._broken = self._broken or self._last.failure

    async def _compare(self) -> None:
        """Waits for the answer before this action: the agent acts on the one that counts. It is
        known already, but where this worker reads more slowly than the agent."""
        last = self._last
        while last is not None and last.call not in self._first:
            self._read.clear()
            await self._read.wait()
        if last is not None and not alike(last, self._first[last.call]):
            self._broken = infrastructure("superseded", "another worker's answer came first")

    async def _act(self, environment: Environment, action: ActionRequested) -> ObservationRecorded:
        began = now()
        try:
            if action.kind == "reset":
                observation = await environment.reset(_view(action, self._setup.options))
            else:
                observation = await environment.step(str(json.loads(action.payload)["action"]))
            run_ms = int((now() - began) * 1000)
            return answer_to(action, observation, self._instance, run_ms=run_ms)
        except Exception as error:  # an environment's own code: typed and retried, never rewarded
            self._broken = failure_of(error)
            return answer_to(action, Observation(), self._instance, failure=self._broken)


def _view(action: ActionRequested, options: Mapping[str, Any]) -> TaskView:
    return TaskView(
        number=action.task,
        sample=action.sample,
        payload=json.loads(action.payload),
        options={**options, **json.loads(action.environment.options)},
        seed=action.seed,
    )
