"""The worker's end of a child process for isolated episodes; `episode_child.py` is the other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.errors import HeadraceError, TooLarge
from headrace.schemas.events import Event
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.crash_isolation.frames import LIMIT, Frame, FrameCodec
from headrace.services.agent.crash_isolation.isolation import HANG_S, IsolatedEpisode
from headrace.services.base.clock import now
from headrace.services.processes.child_process import ChildProcess, LineTooLong

READY_S = 60.0
"""Seconds that a child has to load the recipe's agents."""


class EpisodesProcess:
    """A child process that runs isolated episodes."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self._codec = FrameCodec()

    @classmethod
    async def start(cls, recipe: Recipe) -> EpisodesProcess:
        """Starts a child that has loaded the recipe's agents. Raises HeadraceError if it can't."""
        from headrace.services.agent.crash_isolation import episode_child as child

        command = (sys.executable, "-m", child.__name__)
        made = cls(await ChildProcess.start(command, limit=LIMIT))
        try:
            await made._prepare(recipe)
        except BaseException:  # Whatever the reason is, no process may be left behind.
            await made.aclose()
            raise
        return made

    async def _prepare(self, recipe: Recipe) -> None:
        self._write(Frame("recipe", text=recipe.canonical()))
        try:
            async with asyncio.timeout(READY_S):
                end = await self._receive()
        except TimeoutError:
            end = f"not ready within {READY_S:g} s"
        if not isinstance(end, Frame):
            raise HeadraceError(
                f"a child process for the agents' code did not come up ({end}). See the log of "
                "this worker for the reason"
            )

    async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
        """See `Child.run`. A child that runs past all deadlines counts as dead."""
        for number, isolated in enumerate(isolated_episodes):
            isolated.tell = partial(self._tell, number)
            start = Frame("start", number=isolated.attempt, at=isolated.recorded_at)
            isolated.tell(replace(start, event=isolated.started))
            if isolated.cancelled is not None:
                isolated.tell(Frame("cancel", text=isolated.cancelled))
        last = max(isolated.started.deadline for isolated in isolated_episodes) / 1000
        try:
            async with asyncio.timeout(max(0.0, last - now()) + HANG_S):
                while not all(isolated.ended for isolated in isolated_episodes):
                    frame = await self._receive()
                    if not isinstance(frame, Frame):
                        return frame
                    isolated = isolated_episodes[frame.run]
                    if frame.kind == "ended":
                        isolated.ended = True
                    elif frame.event is not None:
                        relaying = self._relay(isolated, frame, frame.event)
                        isolated.context.spawn(relaying, f"relay {isolated.started.event_id}")
        except TimeoutError:
            return "it hung"
        return None

    async def aclose(self) -> None:
        """Kills the child and all that it started."""
        await self._process.aclose()

    async def _relay(self, isolated: IsolatedEpisode, frame: Frame, event: Event) -> None:
        sent = Frame("sent", frame.run, frame.number)
        try:
            sent = replace(sent, ref=await isolated.relay(event))
        except TooLarge as error:
            sent = replace(sent, text=str(error))
        self._write(sent)

    def _tell(self, run: int, frame: Frame) -> None:
        self._write(replace(frame, run=run))

    def _write(self, frame: Frame) -> None:
        # The buffer stays small: there are only a few frames for each live episode.
        self._process.send(self._codec.encode(frame))

    async def _receive(self) -> Frame | str:
        """The child's next frame, or how it ended."""
        try:
            line = await self._process.receive()
        except LineTooLong as error:
            return str(error)
        return await self._process.describe_end() if line is None else self._codec.decode(line)
