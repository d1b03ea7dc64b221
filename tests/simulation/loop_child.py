"""A child process in the loop: what runs suspects where there are no real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.agents import load_agents
from headrace.services.agent.crash_isolation.episode_child import pass_on
from headrace.services.agent.crash_isolation.isolation import IsolatedEpisode
from headrace.services.agent.episode_run import EpisodeRun

child: ContextVar[LoopChild | None] = ContextVar("child", default=None)
"""The child that a task runs in."""


class LoopChild:
    """Runs each suspect as a task. Whoever calls `die` in one ends them all."""

    def __init__(self, recipe: Recipe) -> None:
        self._agents = load_agents(recipe)
        self._runs: list[EpisodeRun] = []
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
        for run in self._runs:
            run.stop()

    async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
        """As Child has it."""
        child.set(self)
        for isolated in isolated_episodes:
            setup = self._agents[isolated.started.submitted.agent]
            started, at = isolated.started, isolated.recorded_at
            run = EpisodeRun(isolated.relay, started, at, setup, {isolated.attempt: {}})
            self._runs.append(run)
            isolated.tell = partial(pass_on, run)
            if isolated.cancelled is not None:
                run.cancel(isolated.cancelled)
            run.task = asyncio.create_task(self._run(isolated, run))
        child.set(None)
        tasks = [run.task for run in self._runs if run.task is not None]
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()  # an error of the log ends the worker
        return self._death.result() if self._death.done() else None

    async def _run(self, isolated: IsolatedEpisode, run: EpisodeRun) -> None:
        await run.run()
        isolated.ended = True

    async def aclose(self) -> None:
        """Ends what runs."""
        for run in self._runs:
            run.stop()
