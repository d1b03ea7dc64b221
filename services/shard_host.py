"""One shard at work: its intake, its two phases of take-over, and its place in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from services.errors import HeadraceError
from services.kafka.broker import (
    METADATA_LIMIT,
    Committed,
    End,
    FencedWriter,
    Partition,
    Record,
)
from services.ledger import Ledger
from services.log import EventLog, handling, reached
from services.shard import CLOSE_S, Shard, ShardContext

logger = logging.getLogger(__name__)

INTAKE = 1_000
"""Most records of one shard that are read and not yet handled."""

HANDLED = Counter("headrace_events_handled_total", "Events handled.", ["topic"])


@dataclass(eq=False)
class ShardHost:
    """One shard, its intake, and its place in the log."""

    log: EventLog
    context: ShardContext
    shard: Shard
    next_offset: int
    positions: dict[Partition, int]
    """Where each `committed` companion is read and handled up to."""
    behind: dict[Partition, int]
    """Partitions not yet read to the end seen at assignment."""
    companions: Sequence[Partition]
    ledger: Ledger
    writer: FencedWriter | None
    intake: asyncio.Queue[Record | End] = field(
        default_factory=lambda: asyncio.Queue(maxsize=INTAKE)
    )
    committed: Committed | None = None
    pump: asyncio.Task[None] | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self._noted: Mapping[Partition, int] = dict(self.positions)
        places = (self.context.partition, *self.companions)
        self._handled = {place: HANDLED.labels(place.topic) for place in places}

    async def run(self) -> None:
        """Handles what arrives, in order, for as long as the partition is held."""
        await self._maybe_caught_up()
        while True:
            item = await self.intake.get()
            if isinstance(item, Record):
                await self._on_record(item)
            self._moved(item)
            if self.behind and reached(item, self.behind):
                await self._maybe_caught_up()

    async def _maybe_caught_up(self) -> None:
        if not self.behind and not self.context.caught_up:
            self.context.caught_up = True
            await self.shard.on_caught_up()

    async def _on_record(self, record: Record) -> None:
        done: Callable[[], None] | None = None
        if record.partition == self.context.partition:
            done = self.ledger.begin(record.offset, self._noted)
        delivery = await self.log.decode_or_dead_letter(record)
        if delivery is not None:
            handling(delivery)
            await self.shard.on_event(delivery)
            self._handled[record.partition].inc()
        if done is not None:
            done()

    def _moved(self, item: Record | End) -> None:
        """Notes how far a partition is handled. Catching up, the committed positions stay noted."""
        position = item.offset + 1 if isinstance(item, Record) else item.offset
        if item.partition == self.context.partition:
            self.next_offset = max(self.next_offset, position)
        elif item.partition in self.positions and position > self.positions[item.partition]:
            self.positions[item.partition] = position
            if self.context.caught_up:
                self._noted = dict(self.positions)

    def place(self) -> Committed:
        """What to commit: the oldest record that is not done, or the next one."""
        oldest = self.ledger.oldest()
        if oldest is not None:
            return Committed(oldest.offset, _note(oldest.positions))
        positions = self.positions if self.context.caught_up else self._noted
        return Committed(self.next_offset, _note(positions))

    async def close(self, *, lost: bool) -> None:
        """Ends the shard, bounded. What was read and not handled is read by the next owner."""
        self.closed = True
        if lost:
            self.context.cut()
        try:
            async with asyncio.timeout(CLOSE_S):
                if self.pump is not None:
                    self.pump.cancel()
                    await asyncio.wait([self.pump])
                await self.shard.aclose()
        except TimeoutError:
            logger.warning("shard %s did not close in %s s", self.context.partition, CLOSE_S)
        while not self.intake.empty():
            self.intake.get_nowait()
        await self.context.close(lost=lost)


def _note(positions: Mapping[Partition, int]) -> str:
    """The companions' positions as commit metadata: offsets in the order of their partitions."""
    text = json.dumps([positions[place] for place in sorted(positions)], separators=(",", ":"))
    if len(text) > METADATA_LIMIT:
        raise HeadraceError(
            f"the positions of {len(positions)} partitions take {len(text)} bytes of commit "
            f"metadata, more than the {METADATA_LIMIT} that a broker takes: use fewer partitions"
        )
    return text


def read_note(metadata: str, places: Sequence[Partition]) -> dict[Partition, int] | None:
    """The positions noted beside a commit; None where nothing is noted."""
    if not metadata:
        return None
    offsets = json.loads(metadata)
    if len(offsets) != len(places):
        raise HeadraceError(
            f"a commit notes {len(offsets)} companion positions where {len(places)} are read: "
            f"it was made with another recipe or number of partitions"
        )
    return dict(zip(sorted(places), offsets, strict=True))
