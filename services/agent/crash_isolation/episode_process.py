"""The worker's end of a child process for isolated episodes; `episode_child.py` is the other."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from headrace.errors import HeadraceError, TooLarge
from headrace.schemas.events import Ref
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.crash_isolation.frames import Frame, FrameCodec
from headrace.services.agent.crash_isolation.isolation import HANG_S, IsolatedEpisode
from headrace.services.agent.requests import Answer
from headrace.services.base.clock import now

logger = logging.getLogger(__name__)

READY_S = 60.0
"""Seconds that a child has to load the recipe's agents."""
DEATH_S = 1.0
"""Seconds that a child has to end after its socket has ended."""


class ChildProcess:
    """A child in a process group of its own. `aclose` kills the whole group."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._codec = FrameCodec()
        self._numbers: dict[IsolatedEpisode, int] = {}

    @classmethod
    async def start(cls, recipe: Recipe) -> ChildProcess:
        """Starts a child that has loaded the recipe's agents. Raises HeadraceError if it can't."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "headrace.services.agent.crash_isolation.episode_child",
                    str(theirs.fileno()),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # What it does to its process group must not reach the worker.
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        child = cls(process, reader, writer)
        try:
            await child._prepare(recipe)
        except BaseException:
            await child.aclose()
            raise
        return child

    async def _prepare(self, recipe: Recipe) -> None:
        self._write(Frame("recipe", text=recipe.canonical()))
        frame = None
        with suppress(TimeoutError):
            frame = await asyncio.wait_for(self._codec.read_async(self._reader), READY_S)
        if frame is None:
            death = await self._death()  # gives it time to write to the log
            raise HeadraceError(
                f"the child process for isolated episodes did not come up ({death}); this worker's "
                f"log says why"
            )

    async def run(self, isolated_episodes: Sequence[IsolatedEpisode]) -> str | None:
        """See IsolationChild. A child that runs past all deadlines counts as dead."""
        for number, isolated in enumerate(isolated_episodes):
            self._numbers[isolated] = number
            isolated.host = self
            self._write(
                Frame(
                    "start",
                    number,
                    number=isolated.attempt,
                    at=isolated.recorded_at,
                    event=isolated.started,
                )
            )
            if isolated.cancelled is not None:
                self.cancel(isolated, isolated.cancelled)
        last = max(isolated.started.deadline for isolated in isolated_episodes) / 1000
        try:
            async with asyncio.timeout(max(0.0, last - now()) + HANG_S):
                while not all(isolated.ended for isolated in isolated_episodes):
                    frame = await self._codec.read_async(self._reader)
                    if frame is None:
                        return await self._death()
                    self._on_frame(isolated_episodes[frame.run], frame)
        except TimeoutError:
            return "it hung"
        return None

    def answer(self, isolated: IsolatedEpisode, answer: Answer) -> None:
        """Passes an answer to an episode."""
        self._write(Frame("answer", self._numbers[isolated], event=answer))

    def cancel(self, isolated: IsolatedEpisode, reason: str) -> None:
        """Ends an episode as cancelled."""
        self._write(Frame("cancel", self._numbers[isolated], text=reason))

    def stop(self, isolated: IsolatedEpisode) -> None:
        """Ends an episode, which then writes nothing."""
        self._write(Frame("stop", self._numbers[isolated]))

    async def aclose(self) -> None:
        """Kills the child and all that it started."""
        self._writer.close()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

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
        if not self._writer.is_closing():
            self._writer.write(self._codec.encode(frame))

    async def _death(self) -> str:
        """Returns how the process ended, after the end of its socket."""
        try:
            code = await asyncio.wait_for(self._process.wait(), DEATH_S)
        except TimeoutError:
            return "it closed its socket"
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
