"""A child process in the loop: what runs suspects where there are no real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar

from headrace.errors import TooLarge
from headrace.schemas.events import Event, GenerationCompleted, ObservationRecorded, Ref
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.agents import load_agents
from headrace.services.agent.crash_isolation.frames import Frame
from headrace.services.agent.crash_isolation.isolation import IsolatedEpisode
from headrace.services.agent.episode_run import EpisodeRun

child: ContextVar[LoopChild | None] = ContextVar("child", default=None)
"""The child that a task runs in."""


class LoopChild:
    """Runs each suspect as a task. Whoever calls `die` in one ends them all."""

    def __init__(self, recipe: Recipe) -> None:
        self._agents = load_agents(recipe)
        self._runs: dict[IsolatedEpisode, EpisodeRun] = {}
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, recipe: Recipe) -> LoopChild:
        """As a process would: a moment later."""
        await asyncio.sleep(0.3)
        return cls(recipe)

    def die(self) -> None:
        """Ends it as a fault would."""
        if not self._death.done():
            self._death.set_result("SIGKILL")
        for run in self._runs.values():
            run.stop()

    async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
        """As Child has it."""
        child.set(self)
        for isolated in isolated_episodes:
            setup = self._agents[isolated.started.submitted.agent]
            outlet = _Relay(isolated)
            started, at = isolated.started, isolated.recorded_at
            run = EpisodeRun(outlet, started, at, setup, {isolated.attempt: {}})
            self._runs[isolated] = run
            isolated.host = self
            if isolated.cancelled is not None:
                run.cancel(isolated.cancelled)
            run.task = asyncio.create_task(self._run(isolated, run))
        child.set(None)
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        await asyncio.wait(tasks)
        return self._death.result() if self._death.done() else None

    async def _run(self, isolated: IsolatedEpisode, run: EpisodeRun) -> None:
        await run.run()
        isolated.ended = True

    def tell(self, isolated: IsolatedEpisode, frame: Frame) -> None:
        """Passes an answer on, or ends the episode, as cancelled or without a word."""
        run = self._runs[isolated]
        if frame.kind == "cancel":
            run.cancel(frame.text)
        elif frame.kind == "stop":
            run.stop()
        else:
            assert isinstance(frame.event, GenerationCompleted | ObservationRecorded)
            run.on_answer(frame.event)

    async def aclose(self) -> None:
        """Ends what runs."""
        for run in self._runs.values():
            run.stop()


class _Relay:
    def __init__(self, isolated: IsolatedEpisode) -> None:
        self._suspect = isolated

    async def send(self, event: Event) -> Ref:
        sent: asyncio.Future[Ref] = asyncio.get_running_loop().create_future()

        def on_sent(result: Ref | TooLarge) -> None:
            if not sent.done():
                if isinstance(result, Ref):
                    sent.set_result(result)
                else:
                    sent.set_exception(result)

        self._suspect.relay(event, on_sent)
        return await sent
