"""Runs one shard: its intake, the two phases of its assignment, and what it commits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from headrace.schemas.events import Ref
from headrace.services.kafka.broker import Committed, End, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import reached
from headrace.services.log.trace import enter_trace
from headrace.services.worker.commit_metadata import CommitMetadata
from headrace.services.worker.shard import CLOSE_S, Shard, ShardContext

logger = logging.getLogger(__name__)

INTAKE = 1_000
"""At most so many records of one shard are read and not yet handled."""

HANDLED = Counter("headrace_events_handled_total", "Events handled.", ["topic"])


@dataclass(eq=False)
class ShardHost:
    """One shard, its intake, and its positions in the log."""

    log: EventLog
    context: ShardContext
    shard: Shard
    positions: dict[Partition, int]
    """Side partition that starts at the commit, to the offset up to which it is handled."""
    behind: dict[Partition, int]
    """Partition that is not caught up, to its end at the assignment."""
    side_partitions: Sequence[Partition]
    commit: Callable[[Mapping[Partition, Committed]], Awaitable[None]] | None = None
    """Commits at once. Given if deaths are counted: an owner counts itself before it works."""
    others_end: int = 0
    """End of the main partition at the assignment. Earlier owners may have worked on what is before
    it, so what followed from these records may lie anywhere behind the assignment's positions."""
    intake: asyncio.Queue[Record | End] = field(
        default_factory=lambda: asyncio.Queue(maxsize=INTAKE)
    )
    unhandled: int = 0
    """Records in the intake."""
    committed: Committed | None = None
    pump: asyncio.Task[None] | None = None
    closed: bool = False
    released_cleanly: bool = False
    """The shard ended without an error, so its open records are not suspected of a crash."""

    def __post_init__(self) -> None:
        self._room = asyncio.Event()
        """Set when the intake may have room, or when the shard is closed."""
        self._next_offset = self.context.begins_at
        """Offset of the next main record to read."""
        self._begun: Mapping[Partition, int] = dict(self.positions)
        """The positions at the assignment."""
        self._noted = self._begun
        self.context.held_positions.now = self._begun
        self.context.on_written = self._on_written
        self._deaths = self.context.deaths
        self._end_at_start: int | None = None
        """The end of the main partition when the shard started to work. A record that crashed
        earlier owners lies before it."""
        read = (self.context.partition, *self.side_partitions)
        self._handled = {each: HANDLED.labels(each.topic) for each in read}

    async def take(self, item: Record | End) -> None:
        """Queues an item, and waits for room if there is none. A closed shard drops it."""
        while self.intake.full() and not self.closed:
            self._room.clear()
            await self._room.wait()
        if not self.closed:
            self.unhandled += isinstance(item, Record)
            self.intake.put_nowait(item)

    async def run(self) -> None:
        """Handles items in their order until the task is cancelled."""
        await self._maybe_caught_up()
        while True:
            item = await self.intake.get()
            self._room.set()
            if isinstance(item, Record):
                self.unhandled -= 1
                await self._on_record(item)
            self._moved(item)
            if self.behind and reached(item, self.behind):
                await self._maybe_caught_up()

    async def _maybe_caught_up(self) -> None:
        if not self.behind and not self.context.caught_up:
            self._end_at_start = self._next_offset
            if self.commit is not None:
                await self.commit({self.context.partition: self.to_commit()})
            self.context.caught_up = True
            # What follows from the records just read is held at the positions before them.
            await self.shard.on_caught_up()
            self._note()

    async def _on_record(self, record: Record) -> None:
        done: Callable[[], None] | None = None
        if record.partition == self.context.partition:
            done = self.context.open_records.begin(record.offset, self._noted)
        delivery = await self.log.decode_or_dead_letter(record)
        if delivery is not None:
            enter_trace(delivery.traceparent)
            await self.shard.on_event(delivery)
            self._handled[record.partition].inc()
        if done is not None:
            done()

    def _moved(self, item: Record | End) -> None:
        """Remembers how far a partition is handled.

        While the shard catches up, commits keep the positions of the assignment.
        """
        position = item.offset + 1 if isinstance(item, Record) else item.offset
        if item.partition == self.context.partition:
            self._next_offset = max(self._next_offset, position)
        elif item.partition in self.positions and position > self.positions[item.partition]:
            self.positions[item.partition] = position
            # What follows from a record must not be noted as handled before the record itself is.
            if self.context.caught_up and not self.context.writing:
                self._note()

    def _on_written(self, refs: Sequence[Ref]) -> None:
        """Passes what this sole writer has written itself: nobody else writes there."""
        for ref in refs:
            written = Partition(ref.topic, ref.partition)
            if ref.offset >= self.positions.get(written, ref.offset + 1):
                self.positions[written] = ref.offset + 1
        self._note()

    def _note(self) -> None:
        self._noted = self.context.held_positions.now = dict(self.positions)

    def to_commit(self) -> Committed:
        """What to commit: the oldest open record, or the next record to read."""
        oldest = self.context.open_records.oldest()
        if oldest is not None:
            offset, positions = oldest.offset, oldest.positions
        else:
            offset = self._next_offset
            positions = self._noted
        held = self.context.held_positions.oldest()
        if held is not None and any(held[each] < at for each, at in positions.items()):
            positions = held
        if offset < self.others_end:
            positions = self._begun
        brief = self.context.open_records.oldest_brief()
        done = self._next_offset if brief is None else brief
        done = max(done, self.context.done_below)
        metadata = CommitMetadata(positions, self._owners(offset), done if done > offset else 0)
        return Committed(offset, metadata.text())

    def _owners(self, offset: int) -> int:
        """How many owners worked on the records from `offset` on and did not release them.

        Earlier owners no longer count when everything is done that was open when this shard
        started to work.
        """
        if self.commit is None:
            return 0
        begun = self._end_at_start is not None
        if self._end_at_start is not None and offset >= self._end_at_start:
            self._deaths = 0
        return self._deaths + (begun and not self.released_cleanly)

    async def close(self, *, lost: bool) -> None:
        """Ends the shard in bounded time. The next owner reads what was not handled."""
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
        finally:
            await self.context.close(lost=lost)
