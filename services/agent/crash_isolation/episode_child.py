"""The child process for episodes that may kill it.

It runs episodes as a worker does, but has no log: their events go to the worker, and the answers
come from it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
from typing import BinaryIO

from headrace.errors import TooLarge
from headrace.schemas.events import (
    EpisodeStarted,
    Event,
    GenerationCompleted,
    ObservationRecorded,
    Ref,
)
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.agent.agents import load_agents
from headrace.services.agent.crash_isolation.contained_tasks import contain_exits
from headrace.services.agent.crash_isolation.frames import LIMIT, Frame, FrameCodec
from headrace.services.agent.episode_run import EpisodeRun
from headrace.services.agent.records import AgentSetup
from headrace.services.processes.pipes import take_pipes

logger = logging.getLogger(__name__)


class EpisodeChild:
    """Runs the episodes of the process."""

    def __init__(self, worker: BinaryIO) -> None:
        self._worker = worker
        self._codec = FrameCodec()
        self._agents: dict[str, AgentSetup] = {}
        self._runs: dict[int, EpisodeRun] = {}
        self._sent: dict[int, asyncio.Future[Ref]] = {}
        """The number of an event that was sent, to its reference in the log."""
        self._numbers = itertools.count()

    def write(self, frame: Frame) -> None:
        """Sends a frame to the worker. It has left this process when this returns."""
        self._worker.write(self._codec.encode(frame) + b"\n")
        self._worker.flush()

    async def main(self, frames: asyncio.StreamReader) -> None:
        """Loads the recipe's agents, then runs what it is told to, until the worker is gone."""
        recipe = self._codec.decode(await frames.readline())
        self._agents = load_agents(parse_recipe(json.loads(recipe.text), "the worker's recipe"))
        self.write(Frame("ready"))
        async for line in frames:
            self._on_frame(self._codec.decode(line))

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == "start":
            self._start(frame)
        elif frame.run not in self._runs:
            return
        elif frame.kind == "sent":
            self._on_sent(frame)
        else:
            pass_on(self._runs[frame.run], frame)

    def _start(self, frame: Frame) -> None:
        started = frame.event
        assert isinstance(started, EpisodeStarted)
        send = functools.partial(self._send, frame.run)
        setup = self._agents[started.submitted.agent]
        run = EpisodeRun(send, started, frame.at, setup, {frame.number: {}})
        self._runs[frame.run] = run
        run.task = asyncio.create_task(run.run())
        run.task.add_done_callback(functools.partial(self._on_done, frame.run))

    async def _send(self, run: int, event: Event) -> Ref:
        """Sends an event of an episode to the log, through the worker."""
        number = next(self._numbers)
        future: asyncio.Future[Ref] = asyncio.get_running_loop().create_future()
        self._sent[number] = future
        try:
            self.write(Frame("send", run, number, event=event))
            return await future
        finally:
            del self._sent[number]

    def _on_sent(self, frame: Frame) -> None:
        future = self._sent.get(frame.number)
        if future is None or future.done():
            return
        if frame.ref is None:
            future.set_exception(TooLarge(frame.text))
        else:
            future.set_result(frame.ref)

    def _on_done(self, number: int, task: asyncio.Task[None]) -> None:
        del self._runs[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("an episode's run failed", exc_info=error)
            os._exit(1)
        self.write(Frame("ended", number))


def pass_on(run: EpisodeRun, frame: Frame) -> None:
    """Passes to an episode what happened to it outside of its process."""
    if frame.kind == "cancel":
        run.cancel(frame.text)
    elif frame.kind == "stop":
        run.stop()
    else:
        assert isinstance(frame.event, GenerationCompleted | ObservationRecorded)
        run.on_answer(frame.event)


async def main() -> None:
    """Runs the process."""
    contain_exits()
    received, sent = take_pipes()
    frames = asyncio.StreamReader(LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(frames), received
    )
    await EpisodeChild(sent).main(frames)


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)-7s agent's child %(message)s"
    )
    asyncio.run(main())
