"""One shard at work: its intake, its two phases of take-over, and its place in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from headrace.services.kafka.broker import Committed, End, FencedWriter, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import reached
from headrace.services.log.trace import enter_trace
from headrace.services.worker.commit_metadata import CommitMetadata
from headrace.services.worker.open_records import OpenRecords
from headrace.services.worker.shard import CLOSE_S, Shard, ShardContext

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
    side_partitions: Sequence[Partition]
    open_records: OpenRecords
    writer: FencedWriter | None
    commit: Callable[[Committed], Awaitable[None]] | None = None
    """Commits at once, where owners are counted: before the shard begins to work, it is one."""
    intake: asyncio.Queue[Record | End] = field(
        default_factory=lambda: asyncio.Queue(maxsize=INTAKE)
    )
    committed: Committed | None = None
    pump: asyncio.Task[None] | None = None
    closed: bool = False
    handed_over: bool = False
    """It was ended in order: what is open is not its doing."""

    def __post_init__(self) -> None:
        self._room = asyncio.Event()
        """Set whenever there may be room in the intake, or none is needed any more."""
        self._begun: Mapping[Partition, int] = dict(self.positions)
        """Where the companions stood at assignment."""
        self._noted = self._begun
        self._deaths = self.context.deaths
        self._isolation_end: int | None = None
        """Where the main partition ended as the shard began to work: what killed lies before."""
        places = (self.context.partition, *self.side_partitions)
        self._handled = {place: HANDLED.labels(place.topic) for place in places}

    async def take(self, item: Record | End) -> None:
        """Queues an item; waits for room. One that comes after the shard's end is dropped."""
        while self.intake.full() and not self.closed:
            self._room.clear()
            await self._room.wait()
        if not self.closed:
            self.intake.put_nowait(item)

    async def run(self) -> None:
        """Handles what arrives, in order, for as long as the partition is held."""
        await self._maybe_caught_up()
        while True:
            item = await self.intake.get()
            self._room.set()
            if isinstance(item, Record):
                await self._on_record(item)
            self._moved(item)
            if self.behind and reached(item, self.behind):
                await self._maybe_caught_up()

    async def _maybe_caught_up(self) -> None:
        if not self.behind and not self.context.caught_up:
            self._isolation_end = self.next_offset
            if self.commit is not None:
                await self.commit(self.place())
            self.context.caught_up = True
            self._noted = dict(self.positions)
            await self.shard.on_caught_up()

    async def _on_record(self, record: Record) -> None:
        done: Callable[[], None] | None = None
        if record.partition == self.context.partition:
            begun = record.offset < self.context.begun_below
            done = self.open_records.begin(record.offset, self._begun if begun else self._noted)
        delivery = await self.log.decode_or_dead_letter(record)
        if delivery is not None:
            enter_trace(delivery.traceparent)
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
        oldest = self.open_records.oldest()
        if oldest is not None:
            offset, positions = oldest.offset, oldest.positions
        else:
            offset = self.next_offset
            begun = not self.context.caught_up or offset < self.context.begun_below
            positions = self._begun if begun else self.positions
        return Committed(offset, CommitMetadata(positions, self._owners(offset)).text())

    def _owners(self, offset: int) -> int:
        """How many owners what is open from `offset` on has had, which have not let go of it.

        All that was open as the shard began to work being done, those before it are forgiven.
        """
        if self.commit is None:
            return 0
        begun = self._isolation_end is not None
        if self._isolation_end is not None and offset >= self._isolation_end:
            self._deaths = 0
        return self._deaths + (begun and not self.handed_over)

    async def close(self, *, lost: bool) -> None:
        """Ends the shard, bounded. What was read and not handled is read by the next owner."""
        self.closed = True
        self._room.set()
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
        await self.context.close(lost=lost)
