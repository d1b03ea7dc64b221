"""The worker's end of a child process for isolated episodes; `episode_child.py` is the other."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from headrace.errors import HeadraceError, TooLarge
from headrace.schemas.events import Ref
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
        self._numbers: dict[IsolatedEpisode, int] = {}

    @classmethod
    async def start(cls, recipe: Recipe) -> EpisodesProcess:
        """Starts a child that has loaded the recipe's agents. Raises HeadraceError if it can't."""
        from headrace.services.agent.crash_isolation import episode_child as child

        command = (sys.executable, "-m", child.__name__)
        made = cls(await ChildProcess.start(command, limit=LIMIT))
        try:
            await made._prepare(recipe)
        except BaseException:
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
                f"a child process for the agents' code did not come up ({end}): why is in this log"
            )

    async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
        """See IsolationChild. A child that runs past all deadlines counts as dead."""
        for number, isolated in enumerate(isolated_episodes):
            self._numbers[isolated] = number
            isolated.host = self
            start = Frame("start", number=isolated.attempt, at=isolated.recorded_at)
            self.tell(isolated, replace(start, event=isolated.started))
            if isolated.cancelled is not None:
                self.tell(isolated, Frame("cancel", text=isolated.cancelled))
        last = max(isolated.started.deadline for isolated in isolated_episodes) / 1000
        try:
            async with asyncio.timeout(max(0.0, last - now()) + HANG_S):
                while not all(isolated.ended for isolated in isolated_episodes):
                    frame = await self._receive()
                    if not isinstance(frame, Frame):
                        return frame
                    self._on_frame(isolated_episodes[frame.run], frame)
        except TimeoutError:
            return "it hung"
        return None

    def tell(self, isolated: IsolatedEpisode, frame: Frame) -> None:
        """Hands on what happens to an episode from outside."""
        self._write(replace(frame, run=self._numbers[isolated]))

    async def aclose(self) -> None:
        """Kills the child and all that it started."""
        await self._process.aclose()

    def _on_frame(self, isolated: IsolatedEpisode, frame: Frame) -> None:
        if frame.kind == "ended":
            isolated.ended = True
        elif frame.event is not None:
            isolated.relay(frame.event, partial(self._on_sent, frame))

    def _on_sent(self, sent: Frame, result: Ref | TooLarge) -> None:
        if isinstance(result, Ref):
            self._write(Frame("sent", sent.run, sent.number, ref=result))
        else:
            self._write(Frame("sent", sent.run, sent.number, text=str(result)))

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
