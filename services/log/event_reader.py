"""Reads whole topics as typed events, merged, and says when it has caught up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass

from headrace.errors import RecordsLost
from headrace.schemas.events import Event
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.positions import Start, reached, resolve_starts

START_TRIES = 3
"""What is kept is looked up anew where retention deletes it between the look and the reading."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that was in the log when reading began has been read."""


class EventReader:
    """Whole topics as decoded events, merged; in offset order within a partition.

    Yields one CaughtUp, once all that there was at the first step has been read. With `include_uncommitted`
    it waits, for that, until no transaction open at that step hides any of it: so must a sole
    writer read what it wrote.
    """

    def __init__(
        self, log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool = False
    ) -> None:
        self._log = log
        self._starts = dict(starts)
        self._undecided = include_uncommitted
        self._reader = log.broker.reader()

    async def __aiter__(self) -> AsyncIterator[Delivery[Event] | CaughtUp]:
        behind = await self._begin()
        if not behind:
            yield CaughtUp()
        while True:
            for item in await self._reader.read():
                if isinstance(item, Record):
                    delivery = await self._log.decode_or_dead_letter(item)
                    if delivery is not None:
                        yield delivery
                if behind and reached(item, behind) and not behind:
                    yield CaughtUp()

    async def _begin(self) -> dict[Partition, int]:
        """Begins to read; the ends of what is to be caught up with. RecordsLost where an offset
        that was asked for is gone."""
        tries = START_TRIES
        while True:
            tries -= 1
            try:
                positions, ends = await resolve_starts(
                    self._log, self._starts, include_uncommitted=self._undecided
                )
                await self._reader.assign(positions)
            except RecordsLost:
                if not tries:
                    raise
            else:
                return {place: end for place, end in ends.items() if positions[place] < end}

    async def aclose(self) -> None:
        """Closes the reader beneath."""
        await self._reader.close()


async def read_all(
    log: EventLog, starts: Mapping[Partition, Start], *, include_uncommitted: bool = False
) -> AsyncGenerator[Delivery[Event], None]:
    """All that these partitions hold now, merged; `include_uncommitted` as EventReader has it."""
    reader = EventReader(log, starts, include_uncommitted=include_uncommitted)
    try:
        async for item in reader:
            if isinstance(item, CaughtUp):
                return
            yield item
    finally:
        await reader.aclose()
