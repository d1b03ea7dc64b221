"""Reads partitions without a consumer group: follows them for ever, or reads them to the end.

`follow_records` and `follow_events` begin where a `Start` says and go on for ever. `read_records`
and `read_events` read offset ranges and end. Both hand on one item at a time, so memory stays
small whatever a topic holds. Records leave no trace in a namespace; to decode events leaves one
only if a record is no event and the log is not `read_only`: the record goes to `dead-letters`.

All are generators: close them (`contextlib.aclosing`) to end sooner.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from headrace.errors import DecodeError, RecordsLost
from headrace.schemas.events import Event
from headrace.services.kafka.broker import Broker, End, Partition, Reader, Record
from headrace.services.log.event_log import Delivery, EventLog

START_TRIES = 3
"""How often the first kept offset is looked up, if retention deletes it before it is read."""
ARRIVALS = 64
"""The most events that `follow_arrivals` yields at once."""
PATIENCE_S = 2.0
"""A reader that takes longer reports its progress, and again after each such time."""


@dataclass(frozen=True, slots=True)
class Back:
    """A start this many offsets before the end, or at the first kept offset."""

    offsets: int


@dataclass(frozen=True, slots=True)
class Tail:
    """A start before the last event of a partition, and this many offsets before it or more."""

    offsets: int = 0


Start = int | Back | Tail | Literal["first"]
"""Where a reader begins: at an offset, at the first kept offset, or before the end."""
TAIL = 64
"""A `Tail` without a number begins this many offsets before the end, or more."""

OffsetRange = tuple[int, int]
"""The first offset, and the one after the last. Deleted and future records are left out."""
WHOLE: OffsetRange = (0, 2**63 - 1)
"""All records that a partition holds now."""

_Bounds = tuple[dict[Partition, int], dict[Partition, int]]
"""By partition: the offset to begin at, and the end."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All records that were in the log when reading began have been read."""


EventStream = AsyncGenerator[Delivery[Event] | CaughtUp]
"""What `follow_events` yields."""


class Patience:
    """Reports what is being read, and how far the reader is, if it takes long."""

    def __init__(
        self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._due = clock() + PATIENCE_S

    def reading(self, topic: str, done: int, total: int) -> None:
        """Notes that `done` of `total` offsets have been read."""
        if self._clock() >= self._due:
            self._due = self._clock() + PATIENCE_S
            self._report(f"reading {topic}: {done:,} of {total:,}")


async def follow_events(
    log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool = False
) -> EventStream:
    """Decodes what `follow_records` yields. Records that are no events become dead letters."""
    records = follow_records(log, starts, include_uncommitted=include_uncommitted)
    async with aclosing(records):
        async for item in records:
            if isinstance(item, CaughtUp):
                yield item
            elif (delivery := await log.decode_or_dead_letter(item)) is not None:
                yield delivery


async def follow_arrivals(
    log: EventLog, starts: Mapping[Partition, Start]
) -> AsyncGenerator[list[Delivery[Event] | CaughtUp]]:
    """Yields what `follow_events` yields, in lists of what has arrived: at most ARRIVALS at once.

    For readers of many events: a step of such a stream costs more than what is done with an event.
    """
    arrivals = _follow(log, starts, include_uncommitted=False)
    async with aclosing(arrivals):
        async for items in arrivals:
            for first in range(0, len(items), ARRIVALS):
                decoded = [
                    item if isinstance(item, CaughtUp) else await log.decode_or_dead_letter(item)
                    for item in items[first : first + ARRIVALS]
                ]
                yield [item for item in decoded if item is not None]


async def follow_records(
    log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool = False
) -> AsyncGenerator[Record | CaughtUp]:
    """Yields committed records for ever: merged, and in offset order within a partition.

    Yields one CaughtUp after the records that were in the log at the first step. With
    `include_uncommitted` these include what open transactions wrote, so CaughtUp waits until the
    transactions end; a sole writer reads its own records this way. Raises RecordsLost if the log
    does not hold an offset that was asked for by its number.
    """
    arrivals = _follow(log, starts, include_uncommitted=include_uncommitted)
    async with aclosing(arrivals):
        async for items in arrivals:
            for item in items:
                yield item


async def _follow(
    log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool
) -> AsyncGenerator[list[Record | CaughtUp]]:
    """Yields what `follow_records` yields, in lists of what has arrived."""
    reader = log.broker.reader()
    resolve = partial(resolve_starts, log, starts, include_uncommitted=include_uncommitted)
    try:
        positions, ends = await _begin(reader, resolve)
        behind = {at: end for at, end in ends.items() if positions[at] < end}
        if not behind:
            yield [CaughtUp()]
        begun = False
        while True:
            try:
                items = await reader.read()
            except RecordsLost:
                if begun:
                    raise
                # Retention has deleted the first ones before they were read.
                await reader.close()
                reader = log.broker.reader()
                _, ends = await _begin(reader, resolve)
                behind = {at: ends[at] for at in behind}
                continue
            begun = begun or bool(items)
            arrived: list[Record | CaughtUp] = []
            for item in items:
                if isinstance(item, Record):
                    arrived.append(item)
                if behind and reached(item, behind) and not behind:
                    arrived.append(CaughtUp())
            if arrived:
                yield arrived
    finally:
        await reader.close()


async def read_events(
    log: EventLog, ranges: Mapping[Partition, OffsetRange], *, include_uncommitted: bool = False
) -> AsyncGenerator[Delivery[Event]]:
    """Decodes what `read_records` yields. Records that are no events become dead letters."""
    records = read_records(log.broker, ranges, include_uncommitted=include_uncommitted)
    async with aclosing(records):
        async for record in records:
            if (delivery := await log.decode_or_dead_letter(record)) is not None:
                yield delivery


async def read_records(
    broker: Broker,
    ranges: Mapping[Partition, OffsetRange],
    patience: Patience | None = None,
    *,
    include_uncommitted: bool = False,
) -> AsyncGenerator[Record]:
    """Yields the committed records of these ranges: in offset order within a partition.

    Ends at the ends that the partitions have now. `include_uncommitted` is as for
    `follow_records`: it waits for open transactions.
    """
    reader = broker.reader()
    try:
        positions, ends = await _begin(reader, partial(_kept, broker, ranges, include_uncommitted))
        behind, done = dict(ends), 0
        total = sum(end - positions[at] for at, end in ends.items())
        while behind:
            at_end = []
            for item in await reader.read():
                if isinstance(item, Record) and item.offset < ends[item.partition]:
                    done += 1
                    if patience is not None:
                        patience.reading(item.partition.topic, done, total)
                    yield item
                if reached(item, behind):
                    at_end.append(item.partition)
            if at_end and behind:
                await reader.unassign(at_end)
    finally:
        await reader.close()


async def resolve_starts(
    log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool = False
) -> _Bounds:
    """The offset that each start means now, and each partition's end (see `Broker.ends`)."""
    bounds = await log.broker.ends(list(starts), include_uncommitted=include_uncommitted)
    positions = {}
    for at, start in starts.items():
        first, end = bounds[at]
        if isinstance(start, Back):
            positions[at] = max(first, end - start.offsets)
        elif isinstance(start, Tail):
            positions[at] = max(first, await _tail(log, at, first, end) - start.offsets)
        else:
            positions[at] = start if isinstance(start, int) else first
    return positions, {at: end for at, (_, end) in bounds.items()}


def reached(item: Record | End, behind: dict[Partition, int]) -> bool:
    """Removes a partition from `behind` if `item` reaches its end. True if it did."""
    end = behind.get(item.partition)
    position = item.offset + 1 if isinstance(item, Record) else item.offset
    if end is None or position < end:
        return False
    del behind[item.partition]
    return True


async def require_beginning(broker: Broker, partition: Partition, what: str) -> None:
    """Raises RecordsLost if a partition that holds no `what` has lost its first records.

    A sole writer that finds nothing of its own would otherwise start from the beginning, and write
    all its records a second time.
    """
    first, _ = (await broker.ends([partition]))[partition]
    if first > 0:
        raise RecordsLost(
            f"{partition.topic}/{partition.number} holds no {what}, and its offsets 0 to "
            f"{first - 1} were deleted. The decisions recorded there are lost and must not be "
            "made a second time. Start a new namespace"
        )


async def _begin(reader: Reader, resolve: Callable[[], Awaitable[_Bounds]]) -> _Bounds:
    """Assigns what `resolve` finds; if retention deletes that meanwhile, resolves again."""
    tries = START_TRIES
    while True:
        tries -= 1
        try:
            positions, ends = await resolve()
            await reader.assign(positions)
            return positions, ends
        except RecordsLost:
            if not tries:
                raise


async def _kept(
    broker: Broker, ranges: Mapping[Partition, OffsetRange], include_uncommitted: bool
) -> _Bounds:
    """The part of each range that the log holds now. Empty ranges are left out."""
    bounds = await broker.ends(list(ranges), include_uncommitted=include_uncommitted)
    positions, ends = {}, {}
    for at, (start, end) in ranges.items():
        first, last = bounds[at]
        if max(start, first) < min(end, last):
            positions[at], ends[at] = max(start, first), min(end, last)
    return positions, ends


async def _tail(log: EventLog, at: Partition, first: int, end: int) -> int:
    """An offset at or before the last event of a partition.

    The offsets near the end may hold no event: only transaction markers, aborted records or
    records that do not decode. Then the search goes further back.
    """
    reach = TAIL
    while end - reach > first and not await _holds_event(log, at, (end - reach, end)):
        reach *= 8
    return max(first, end - reach)


async def _holds_event(log: EventLog, at: Partition, offsets: OffsetRange) -> bool:
    # The end is known already; it may be that of an open transaction.
    records = read_records(log.broker, {at: offsets}, include_uncommitted=True)
    async with aclosing(records):
        async for record in records:
            with suppress(DecodeError):
                await log.decode(record)
                return True
    return False
