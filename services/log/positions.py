"""Where in a partition reading begins, and when it has come to the end that was seen then."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from headrace.errors import DecodeError, RecordsLost
from headrace.services.kafka.broker import Broker, End, Partition, Record
from headrace.services.log.event_log import EventLog


@dataclass(frozen=True, slots=True)
class Back:
    """So many offsets before the end, or the first that is kept."""

    offsets: int


Start = int | Back | Literal["first", "tail"]
"""Where a reader begins: an offset, the first that is kept, or shortly before the end."""
TAIL = 64
"""Offsets before the end that a `tail` covers, or more: the last event is among them."""


async def resolve_starts(
    log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool = False
) -> tuple[dict[Partition, int], dict[Partition, int]]:
    """The offset that each start means now, and each partition's end (see `Broker.ends`)."""
    bounds = await log.broker.ends(list(starts), include_uncommitted=include_uncommitted)
    tails = {place: bounds[place] for place, start in starts.items() if start == "tail"}
    positions = {place: first for place, (first, _) in bounds.items()}
    for place, start in starts.items():
        if isinstance(start, int):
            positions[place] = start
        elif isinstance(start, Back):
            first, end = bounds[place]
            positions[place] = max(first, end - start.offsets)
    positions |= await _tails(log, tails)
    return positions, {place: end for place, (_, end) in bounds.items()}


async def _tails(
    log: EventLog, bounds: Mapping[Partition, tuple[int, int]]
) -> dict[Partition, int]:
    """Of each partition an offset at or before its last event. What lies near the end may be none,
    but marks of transactions, records that were taken back, and garbage."""
    begins: dict[Partition, int] = {}
    reach, empty = TAIL, list(bounds)
    while empty:
        for place in empty:
            first, end = bounds[place]
            begins[place] = max(first, end - reach)
        unsure = {at: (begins[at], bounds[at][1]) for at in empty if begins[at] > bounds[at][0]}
        empty = await _without_events(log, unsure)
        reach *= 8
    return begins


async def _without_events(
    log: EventLog, spans: Mapping[Partition, tuple[int, int]]
) -> list[Partition]:
    """The partitions that hold no event from one offset to another."""
    if not spans:
        return []
    behind = {place: end for place, (_, end) in spans.items()}
    empty = list(spans)
    reader = log.broker.reader()
    try:
        await reader.assign({place: begin for place, (begin, _) in spans.items()})
        while behind:
            for item in await reader.read():
                if isinstance(item, Record) and item.partition in behind:
                    with suppress(DecodeError):
                        await log.decode(item)
                        empty.remove(item.partition)
                        del behind[item.partition]
                reached(item, behind)
    finally:
        await reader.close()
    return empty


async def require_beginning(broker: Broker, place: Partition, what: str) -> None:
    """RecordsLost where a partition in which `what` was looked for in vain has lost its beginning.

    A sole writer that finds nothing of its own would begin anew, and write all a second time.
    """
    first, _ = (await broker.ends([place]))[place]
    if first > 0:
        raise RecordsLost(
            f"{place.topic}/{place.number} holds no {what}, and its offsets 0 "
            f"to {first - 1} were deleted: what was decided there is lost, and must not be decided "
            "again. Begin a new namespace"
        )


def reached(item: Record | End, behind: dict[Partition, int]) -> bool:
    """Takes a partition out of `behind` once `item` reaches its end. True where it did."""
    end = behind.get(item.partition)
    position = item.offset + 1 if isinstance(item, Record) else item.offset
    if end is None or position < end:
        return False
    del behind[item.partition]
    return True
