"""Reads the progress of a run from its topics. No process is asked for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress

from headrace.errors import DecodeError
from headrace.schemas.events import Event
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
"""Offsets of `batches` that are read. A curve shows this many batches and transaction markers."""


def progress_partitions(topics: Topics) -> list[Partition]:
    """Returns all partitions of `tasks`, `results`, `batches.*` and `policies`."""
    names = {topic.name for topic in (TASKS, RESULTS, BATCHES, POLICIES)}
    read = [topic for topic in topics if topic.topic.name in names]
    return [partition for topic in read for partition in topic.all_partitions()]


async def follow_progress(
    log: EventLog,
    progress: Progress,
    on_change: Callable[[], None],
    on_event: Callable[[Event], None] = lambda event: None,
) -> None:
    """Folds events into `progress` without end. `on_event` gets each of them, too.

    Calls `on_change` when it has caught up with the log, and after every later event.
    """
    starts: dict[Partition, Start] = dict.fromkeys(progress_partitions(log.topics), "first")
    caught_up = False
    async with aclosing(follow_events(log, starts)) as items:
        async for item in items:
            if isinstance(item, CaughtUp):
                caught_up = True
            else:
                progress.on_event(item.event, item.recorded_at, item.offset)
                on_event(item.event)
            if caught_up:
                on_change()


async def read_recent(log: EventLog, progress: Progress, recent: int) -> dict[Partition, int]:
    """Folds the last records of each partition. Returns the first offset read of each.

    Reads at most `recent` offsets of each partition, and fewer of `batches`, whose records are
    large. It still finds every policy's newest version, however old that is. Leaves no trace.
    """
    partitions = progress_partitions(log.topics)
    bounds = await log.broker.ends(partitions)
    large = {log.topics.name(BATCHES, policy) for policy in log.topics.policies}
    begins = {
        one: max(first, end - (min(recent, BATCH_OFFSETS) if one.topic in large else recent))
        for one, (first, end) in bounds.items()
    }
    await _fold(log, progress, {one: (begins[one], bounds[one][1]) for one in partitions})
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
