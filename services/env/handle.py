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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from headrace.errors import HeadraceError, InfrastructureError
from headrace.schemas.events import ActionRequested, Failure, ObservationRecorded
from headrace.services.base.clock import now
from headrace.services.base.concurrency import is_failure
from headrace.services.base.shown import shown
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.answers import (
    Answer,
    answer_to,
    deliver,
    failed,
    failure_of,
    infrastructure,
    too_late,
)
from headrace.services.env.environment import Claim, Environment, Judge, Resumable
from headrace.services.env.environment_files import collected, files_of, require_files, store_files
from headrace.services.env.setup import Preparing, Setup, close_safely, is_preparing

logger = logging.getLogger(__name__)

History = Sequence[tuple[ActionRequested, bytes]]
"""Actions, each with the digest of the answer that the agent saw."""


class Handle:
    """The environment of one attempt. `run` is its whole life; `put` adds actions."""

    __slots__ = (
        *("attempt", "expires_at", "task", "_setup", "_reset", "_answer", "_instance", "_claim"),
        *("_history", "_step_s", "_actions", "_done", "_last", "_unsure", "_news", "_broken"),
        *("_over", "_sizes", "_ends_at"),
    )

    def __init__(
        self,
        setup: Setup,
        reset: ActionRequested,
        answer: Answer,
        instance: str,
        claim: Claim,
        history: History = (),
        step_s: float | None = None,
        unsure: int = -1,
    ) -> None:
        """`history` holds the actions of which the agent has the answers. Another worker may have
        answered the actions up to index `unsure`, too.

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
        self._actions: list[ActionRequested] = []
        """Those that are not answered yet, in the order of the log."""
        self._done = history[-1][0].index if history else -1
        self._news: asyncio.Future[None] | None = None
        """Done when an action comes. None: nobody waits. A queue would take a kilobyte."""
        self._sizes: dict[str, int] = {}
        """The sizes in bytes of the files that this worker gave out so far, by name."""
        self._last: ObservationRecorded | None = None
        """The last answer that was given here."""
        self._unsure = unsure
        self._broken: Failure | None = None
        self._over = False
        """Whether it has ended for every worker, and not only for this one."""
        self._ends_at = self.expires_at
        """When it has to end in this worker, in seconds since the epoch."""

    def put(self, action: ActionRequested) -> None:
        """Add an action of this attempt. The caller keeps the order of the log."""
        self._actions.append(action)
        self._wake()

    def end(self) -> None:
        """End it for good, for every worker."""
        self._over = True
        self.leave()
        if self.task is not None:
            self.task.cancel()

    def leave(self) -> None:
        """Note that it has to end now in this worker. The caller cancels its task."""
        self._ends_at = min(self._ends_at, now())

    async def run(self) -> None:
        """Wait for a slot, then answer actions until the deadline or the task's cancellation."""
        async with self._prepared(), self._setup.slots.slot(lambda: self._ends_at):
            if self._over:
                return
            environment: Environment | None = None
            fit = False
            try:
                async with asyncio.timeout(max(0.0, self.expires_at - now())) as deadline:
                    while True:
                        idle = environment is not None and not self._actions
                        fit = idle and self._broken is None
                        while not self._actions:
                            await self._wait()
                        action = self._actions.pop(0)
                        fit = False
                        if environment is None and self._broken is None:
                            environment = await self._take()
                            if environment is not None:
                                await self._rebuild(environment)
                        await self._perform(environment, action)
                        if self._over or deadline.expired():  # Its code caught the cancellation.
                            self._over = True
                            break
                        if self._ends_at <= now():  # It was released meanwhile.
                            break
            except TimeoutError:
                self._over = True
                logger.info("environment of task %d ended at its deadline", self._reset.task)
            finally:
                if isinstance(environment, Resumable) and not self._over:
                    await close_safely(environment.release, self._reset.environment.use)
                elif environment is not None:
                    await self._setup.give_back(self._reset.environment, environment, fit)

    def _prepared(self) -> AbstractAsyncContextManager[None]:
        if is_preparing(self._setup):
            return self._preparing(self._setup)
        return nullcontext()  # it takes little memory, and most episodes sleep in it

    @asynccontextmanager
    async def _preparing(self, setup: Preparing) -> AsyncIterator[None]:
        """Get what the episode needs, or note what went wrong."""
        async with AsyncExitStack() as stack:
            self._setup.slots.waiting += 1
            try:
                async with asyncio.timeout(max(0.0, self.expires_at - now())):
                    use, resumed = self._reset.environment, bool(self._history)
                    await stack.enter_async_context(setup.prepared(use, self._claim, resumed))
            except TimeoutError:
                self._over = True
                logger.info("task %d was not ready at its deadline", self._reset.task)
            except Exception as error:  # as in _act
                self._broken = failure_of(error)
            finally:
                self._setup.slots.waiting -= 1
            yield

    async def _wait(self) -> None:
        """Wait for an action. Only `run` may wait."""
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _take(self) -> Environment | None:
        """Get an environment, or note what went wrong."""
        try:
            return await self._setup.take(self._reset.environment, self._claim)
        except BaseException as error:  # as in _act: making it runs an environment's own code
            if not is_failure(error, self.task):
                raise
            self._broken = failure_of(error)
            return None

    async def _rebuild(self, environment: Environment) -> None:
        """Resume it, or repeat the recorded actions and note where an answer differs."""
        if self._history and isinstance(environment, Resumable):
            await self._resume(environment)
            return
        if self._history and not environment.replayable:
            self._broken = infrastructure("sandbox_lost", "its worker is gone")
        for action, recorded in self._history:
            if self._broken is not None:
                return
            if action.kind == "collect":  # it has changed nothing
                continue
            observation = await self._act(environment, action)
            if shown(observation) != recorded:
                self._broken = observation.failure or _diverged(action.index)

    async def _resume(self, environment: Resumable) -> None:
        """Resume it in the state that the last answered action left, or note why not."""
        bound = asyncio.timeout(self._step_s)
        try:
            async with bound:
                view = _view(self._reset, self._setup.options)
                files = files_of(self._setup, self._reset)
                await environment.resume(replace(view, artifacts=files), self._done)
            self._broken = None
        except BaseException as error:  # as in _act: it may run an environment's own code
            if not is_failure(error, self.task):
                raise
            late = bound.expired()
            self._broken = failure_of(self._late("resume", environment) if late else error)

    async def _perform(self, environment: Environment | None, action: ActionRequested) -> None:
        """Answer one action. A repeated action gets the last answer again."""
        if self._last is not None and action.call == self._last.call:
            await self._answer(self._last)
            return
        if action.index <= self._done:
            return
        await self._compare(environment, action)
        if self._broken is None and action.index != self._done + 1:
            self._broken = infrastructure("sandbox_lost", f"action {self._done + 1} is missing")
        if self._broken is not None or environment is None:
            observation = failed(action, self._instance, self._broken, self._claim.partition)
        else:
            observation = await self._act(environment, action)
        self._last = await deliver(self._answer, action, observation)
        self._done = action.index
        self._broken = self._broken or self._last.failure

    async def _compare(self, environment: Environment | None, action: ActionRequested) -> None:
        """Check that the last answer is the one that counts: the agent acts on that one."""
        last = self._last
        if last is None or action.after is None or action.after == shown(last):
            return
        if last.index > self._unsure:
            superseded = infrastructure("superseded", "another worker's answer came first")
            self._broken = self._broken or superseded
        elif self._broken is None:
            replayable = environment is not None and environment.replayable
            lost = infrastructure("sandbox_lost", "its worker is gone")
            self._broken = _diverged(last.index) if replayable else lost
        elif isinstance(environment, Resumable):
            await self._resume(environment)  # What was begun had been answered after all.

    async def _act(self, environment: Environment, action: ActionRequested) -> ObservationRecorded:
        began = now()
        bound = asyncio.timeout(self._step_s)
        try:
            async with bound:
                observation = await self._observe(environment, action)
            if bound.expired():  # Its code caught the cancellation.
                raise self._late(action.kind, environment)
            run_ms = int((now() - began) * 1000)
            # The time that storing takes is not the environment's.
            stored = await store_files(self._setup, action, observation, self._sizes)
            self._sizes |= {one.name: one.size for one in stored.artifacts}
            return answer_to(
                action,
                observation,
                self._instance,
                run_ms=run_ms,
                stored=stored,
                partition=self._claim.partition,
            )
        except BaseException as error:  # an environment's own code: typed and retried
            if not is_failure(error, self.task):
                raise
            late = bound.expired()
            self._broken = failure_of(self._late(action.kind, environment) if late else error)
            return failed(action, self._instance, self._broken, self._claim.partition)
        finally:
            self._setup.slots.run_s.add(now() - began)

    async def _observe(self, environment: Environment, action: ActionRequested) -> Observation:
        if action.kind == "collect":
            return await collected(environment, action.environment.collect)
        if action.kind != "reset":
            return await environment.step(str(json.loads(action.payload)["action"]))
        require_files(environment, action)
        view = _view(action, self._setup.options)
        return await environment.reset(replace(view, artifacts=files_of(self._setup, action)))

    def _late(self, call: str, environment: object) -> HeadraceError:
        return too_late(call, self._step_s, environment)


def _diverged(index: int) -> Failure:
    message = (
        f"action {index} gave another observation when it was repeated; "
        f"make the environment deterministic, or set replayable = False"
    )
    return infrastructure("diverged", message)


async def score(
    setup: Setup, action: ActionRequested, claim: Claim, instance: str
) -> ObservationRecorded:
    """Answer a `score` action by an environment that is a Judge."""
    own = asyncio.current_task()
    async with setup.slots.slot(lambda: action.expires_at / 1000):
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
            stored = await store_files(setup, action, observation, {})
            answer = answer_to(action, observation, instance, run_ms=run_ms, stored=stored)
            fit = True
        except BaseException as error:  # as in Handle._act
            if not is_failure(error, own):
                raise
            answer = failed(action, instance, failure_of(error))
        finally:
            setup.slots.run_s.add(now() - began)
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
