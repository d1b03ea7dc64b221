"""Reads what a run's progress is made of: the log is the state, nobody reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress

from headrace.errors import DecodeError
from headrace.schemas.topics import BATCHES, POLICIES, RESULTS, TASKS, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import (
    CaughtUp,
    OffsetRange,
    Start,
    follow_events,
    read_records,
)
from headrace.services.operate.run.progress import Progress

BATCH_OFFSETS = 128
"""As many batches as a curve has points, with their transactions' marks."""


def progress_partitions(topics: Topics) -> list[Partition]:
    """All partitions of `tasks`, `results`, `batches.*` and `policies`."""
    names = {topic.name for topic in (TASKS, RESULTS, BATCHES, POLICIES)}
    return [
        partition
        for placed in topics
        if placed.topic.name in names
        for partition in placed.all_partitions()
    ]


async def follow_progress(log: EventLog, progress: Progress, on_change: Callable[[], None]) -> None:
    """Folds events for ever. Calls `on_change` once caught up, and after every event from then."""
    starts: dict[Partition, Start] = dict.fromkeys(progress_partitions(log.topics), "first")
    caught_up = False
    async with aclosing(follow_events(log, starts)) as items:
        async for item in items:
            if isinstance(item, CaughtUp):
                caught_up = True
            else:
                progress.on_event(item.event, item.recorded_at, item.offset)
            if caught_up:
                on_change()


async def read_recent(log: EventLog, progress: Progress, recent: int) -> dict[Partition, int]:
    """Folds the last records of each partition; returns where it began in each.

    At most `recent` offsets each, and fewer of `batches`, which are large. Leaves no trace. Every
    policy's newest version is found, however long ago it was published.
    """
    places = progress_partitions(log.topics)
    bounds = await log.broker.ends(places)
    large = {log.topics.name(BATCHES, policy) for policy in log.topics.policies}
    begins = {
        place: max(first, end - (min(recent, BATCH_OFFSETS) if place.topic in large else recent))
        for place, (first, end) in bounds.items()
    }
    await _fold(log, progress, {place: (begins[place], bounds[place][1]) for place in places})
    policies = log.topics.partition(POLICIES)
    if any(policy.version < 0 for policy in progress.policies.values()):
        await _fold(log, progress, {policies: (bounds[policies][0], begins[policies])})
    return begins


async def _fold(log: EventLog, progress: Progress, ranges: Mapping[Partition, OffsetRange]) -> None:
    async with aclosing(read_records(log.broker, ranges)) as records:
        async for record in records:
            with suppress(DecodeError):
                event = (await log.decode(record)).event
                progress.on_event(event, record.timestamp, record.offset)
