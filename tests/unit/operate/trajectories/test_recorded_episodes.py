"""Reading recorded episodes with the answers to their requests."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.schemas.events import (
    EpisodeEnded,
    Event,
    ObservationRecorded,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.services.kafka.broker import Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.unpacked import Texts
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.trajectories.recorded_episodes import FETCHED_AT_ONCE, EpisodeReader
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.unit.log.log_bench import TOPICS, Bench

EPISODES = 4 * FETCHED_AT_ONCE
STEPS = 5
LENGTH_S = 10.0


class CountingLog(EventLog):
    """Counts the observations that are decoded."""

    decoded = 0

    async def decode(self, record: Record) -> Delivery[Event]:
        found = await super().decode(record)
        self.decoded += isinstance(found.event, ObservationRecorded)
        return found


def test_answers_are_read_from_the_time_of_their_episodes_only() -> None:
    """All of them are in one partition, and are read for some episodes at a time."""
    loop = VirtualTimeLoop(0)

    async def main() -> None:
        bench = Bench()
        await bench.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
        for task in range(EPISODES):
            await play(bench, loop, task)
        log = bench.log
        counting = CountingLog(log.broker, log.topics, log._codec, log._registry, "reader")
        reader = EpisodeReader(counting, Texts(read_recipe("quickstart")), with_answers=True)
        found = [episode async for episode in reader.read((), EPISODES)]
        assert [len(episode.answers) for episode in found] == [STEPS] * EPISODES
        assert counting.decoded < 2 * EPISODES * STEPS

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def play(bench: Bench, loop: VirtualTimeLoop, task: int) -> None:
    began = loop.wall_time()
    for step in range(STEPS):
        await bench.log.send(
            ObservationRecorded(
                task=task, sample=0, attempt=0, call=str(step), index=step, digest=bytes(16)
            )
        )
    await asyncio.sleep(LENGTH_S)
    names: dict[str, Any] = {"source": "s", "task_id": "t", "item_id": "i"}
    trajectory = TrajectoryRecorded(
        task=task, sample=0, agent="default", turns=(), ending="finished",
        started=int(began * 1000), ended=int(loop.wall_time() * 1000), **names,
    )  # fmt: skip
    ref = await bench.log.send(trajectory)
    outcome = EpisodeEnded(task=task, sample=0, item_id="i", ending="finished", trajectory=ref)
    await bench.log.send(TaskEnded(task=task, closed_by="all", outcomes=(outcome,), **names))
