"""Reads offset ranges of topics to their ends, and leaves no trace: no consumer group, no dead letters.

What is read is handed on record by record, so that memory stays small whatever a topic holds.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from headrace.errors import DecodeError, HeadraceError, RecordsLost
from headrace.schemas.events import Event, Ref
from headrace.services.kafka.broker import Broker, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.positions import reached

PATIENCE_S = 2.0
"""What takes longer says how far it is, and again every so often."""
FETCHED_AT_ONCE = 64
"""References whose records are in memory at once."""

OffsetRange = tuple[int, int]
"""First offset, and the one after the last. What retention removed of it is passed over."""


class Patience:
    """Says what is being read, and how far it is, once that takes a while."""

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._due = clock() + PATIENCE_S

    def reading(self, topic: str, done: int, total: int) -> None:
        """Of `total` offsets to read, `done` are read."""
        if self._clock() >= self._due:
            self._due = self._clock() + PATIENCE_S
            self._tell(f"reading {topic}: {done:,} of {total:,}")


async def scan(
    broker: Broker, ranges: Mapping[Partition, OffsetRange], patience: Patience
) -> AsyncGenerator[Record]:
    """The committed records of these offset ranges: in offset order within a partition.

    Ends when all are read. Close it (`aclosing`) to end sooner.
    """
    bounds = await broker.ends(list(ranges))
    starts, behind = {}, {}
    for place, (start, end) in ranges.items():
        first, last = bounds[place]
        if max(start, first) < min(end, last):
            starts[place], behind[place] = max(start, first), min(end, last)
    ends, done = dict(behind), 0
    total = sum(end - starts[place] for place, end in ends.items())
    reader = broker.reader()
    try:
        await reader.assign(starts)
        while behind:
            for item in await reader.read():
                if isinstance(item, Record) and item.offset < ends[item.partition]:
                    done += 1
                    patience.reading(item.partition.topic, done, total)
                    yield item
                if reached(item, behind):
                    await reader.unassign([item.partition])
    finally:
        await reader.close()


async def scan_whole(
    broker: Broker, partitions: Sequence[Partition], patience: Patience
) -> AsyncGenerator[Record]:
    """All that these partitions hold now."""
    whole = dict.fromkeys(partitions, (0, 2**63 - 1))
    async with aclosing(scan(broker, whole, patience)) as records:
        async for record in records:
            yield record


async def fetch_each(log: EventLog, refs: Sequence[Ref]) -> AsyncGenerator[Event | str]:
    """What each reference names, in their order; where that can't be had, why not.

    A few are in memory at once.
    """
    for first in range(0, len(refs), FETCHED_AT_ONCE):
        some = refs[first : first + FETCHED_AT_ONCE]
        try:
            for event in await log.fetch(some):
                yield event
        except (HeadraceError, DecodeError):
            for ref in some:
                yield await _fetch_one(log, ref)


async def _fetch_one(log: EventLog, ref: Ref) -> Event | str:
    try:
        return (await log.fetch([ref]))[0]
    except (RecordsLost, DecodeError) as error:
        return str(error)
