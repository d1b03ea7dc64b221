"""Reads what a run's progress is made of: the log is the state, nobody reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from schemas.topics import BATCHES, POLICIES, RESULTS, TASKS, Topics
from services.kafka.broker import Partition
from services.log import CaughtUp, EventLog, EventReader, Start
from services.run.progress import Progress


def progress_partitions(topics: Topics) -> list[Partition]:
    """All partitions of `tasks`, `results`, `batches.*` and `policies`."""
    names = {topic.name for topic in (TASKS, RESULTS, BATCHES, POLICIES)}
    return [
        Partition(placed.name, number)
        for placed in topics
        if placed.topic.name in names
        for number in range(placed.partitions)
    ]


async def follow_progress(log: EventLog, progress: Progress, on_change: Callable[[], None]) -> None:
    """Folds events for ever. Calls `on_change` once caught up, and after every event from then."""
    starts: dict[Partition, Start] = dict.fromkeys(progress_partitions(log.topics), "first")
    reader = EventReader(log, starts)
    caught_up = False
    try:
        async for item in reader:
            if isinstance(item, CaughtUp):
                caught_up = True
            else:
                progress.on_event(item.event, item.recorded_at, item.offset)
            if caught_up:
                on_change()
    finally:
        await reader.aclose()


async def read_progress(log: EventLog, progress: Progress) -> None:
    """Folds all that is in the log now."""
    done = asyncio.Event()
    following = asyncio.create_task(follow_progress(log, progress, done.set))
    waiting = asyncio.create_task(done.wait())
    await asyncio.wait({following, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        await following
    for task in (following, waiting):
        task.cancel()
    await asyncio.gather(following, waiting, return_exceptions=True)
