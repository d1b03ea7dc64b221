"""The worker's end of a child process that runs suspects; the other end is `child.py`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from schemas.errors import TooLarge
from schemas.events import Ref
from schemas.recipe import Recipe
from services.agent.frames import LIMIT, Frame, FrameCodec
from services.agent.isolation import HANG_S, Suspect
from services.clock import now
from services.errors import HeadraceError
from services.processes.child_process import ChildProcess, LineTooLong

READY_S = 60.0
"""Seconds that a child has to load the recipe's agents."""


class EpisodesProcess:
    """A child process that runs suspects."""

    def __init__(self, process: ChildProcess) -> None:
        self._process = process
        self._codec = FrameCodec()
        self._numbers: dict[Suspect, int] = {}

    @classmethod
    async def start(cls, recipe: Recipe) -> EpisodesProcess:
        """A child that has loaded the recipe's agents. HeadraceError where that fails."""
        from services.agent import child  # which imports the worker, that imports this module

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

    async def run(self, suspects: Sequence[Suspect]) -> str | None:
        """As Child has it. One that hangs past all deadlines counts as dead."""
        for number, suspect in enumerate(suspects):
            self._numbers[suspect] = number
            suspect.host = self
            start = Frame("start", number=suspect.attempt, at=suspect.recorded_at)
            self.tell(suspect, replace(start, event=suspect.started))
            if suspect.cancelled is not None:
                self.tell(suspect, Frame("cancel", text=suspect.cancelled))
        last = max(suspect.started.deadline for suspect in suspects) / 1000
        try:
            async with asyncio.timeout(max(0.0, last - now()) + HANG_S):
                while not all(suspect.ended for suspect in suspects):
                    frame = await self._receive()
                    if not isinstance(frame, Frame):
                        return frame
                    self._on_frame(suspects[frame.run], frame)
        except TimeoutError:
            return "it hung"
        return None

    def tell(self, suspect: Suspect, frame: Frame) -> None:
        """Hands on what happens to an episode from outside."""
        self._write(replace(frame, run=self._numbers[suspect]))

    async def aclose(self) -> None:
        """Kills it, with all that it started."""
        await self._process.aclose()

    def _on_frame(self, suspect: Suspect, frame: Frame) -> None:
        if frame.kind == "ended":
            suspect.ended = True
        elif frame.event is not None:
            suspect.relay(frame.event, partial(self._on_sent, frame))

    def _on_sent(self, sent: Frame, result: Ref | TooLarge) -> None:
        if isinstance(result, Ref):
            self._write(Frame("sent", sent.run, sent.number, ref=result))
        else:
            self._write(Frame("sent", sent.run, sent.number, text=str(result)))

    def _write(self, frame: Frame) -> None:
        # Unbounded, but for what bounds it: a few frames for each live episode.
        self._process.send(self._codec.encode(frame))

    async def _receive(self) -> Frame | str:
        """The child's next frame, or how it ended."""
        try:
            line = await self._process.receive()
        except LineTooLong as error:
            return str(error)
        return await self._process.describe_end() if line is None else self._codec.decode(line)
