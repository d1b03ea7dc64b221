"""The records of the in-memory log: partitions, offsets, transactions, sole writers.

It uses asyncio only for the events that wake readers. As on Kafka, a transaction's records are in
the log from the start, its marker takes an offset, and `read_committed` readers stop at the first
record of the oldest open transaction (the last stable offset).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from headrace.errors import DependencyError, Fenced
from headrace.services.kafka.broker import Outgoing, Partition, Record, records_lost


class _State(Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(eq=False, slots=True)
class Transaction:
    """One transaction of a sole writer, and the partitions that it writes to."""

    logs: dict[Partition, PartitionLog] = field(default_factory=dict)
    state: _State = _State.OPEN

    def mark(self) -> None:
        """Writes a marker to every partition; readers see the decision from now on."""
        for log in self.logs.values():
            log.end_transaction(self)
        self.logs.clear()


@dataclass(frozen=True, slots=True)
class _Entry:
    """One offset. If `record` is None, it is a marker."""

    record: Record | None
    transaction: Transaction | None

    @property
    def visible(self) -> Record | None:
        """The record, if a `read_committed` reader sees one."""
        if self.transaction is not None and self.transaction.state is not _State.COMMITTED:
            return None
        return self.record


class PartitionLog:
    """One partition's records in offset order."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.first = 0
        """The oldest offset that is kept."""
        self.watchers: dict[asyncio.Event, None] = {}
        """Set whenever more can be read. (A dict, because the order of sets does not repeat.)"""
        self._entries: list[_Entry] = []
        self._open: dict[Transaction, int] = {}

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.first + len(self._entries)

    @property
    def stable_end(self) -> int:
        """Where `read_committed` readers stop: all transactions below are decided."""
        return next(iter(self._open.values()), self.end)

    def append(
        self, outgoing: Outgoing, timestamp: float, transaction: Transaction | None = None
    ) -> int:
        """Writes one record and returns its offset."""
        offset = self.end
        record = Record(
            self.partition, offset, timestamp, outgoing.key, outgoing.value, list(outgoing.headers)
        )
        self._entries.append(_Entry(record, transaction))
        if transaction is not None:
            transaction.logs[self.partition] = self
            self._open.setdefault(transaction, offset)
        self.wake()
        return offset

    def end_transaction(self, transaction: Transaction) -> None:
        """Writes the marker of a transaction that has been decided."""
        self._entries.append(_Entry(None, transaction))
        del self._open[transaction]
        self.wake()

    def read(self, position: int, limit: int) -> tuple[list[Record], int]:
        """At most `limit` committed records from `position` on, and the position after them."""
        self.check(position)
        records: list[Record] = []
        stable_end = self.stable_end
        while position < stable_end and len(records) < limit:
            record = self._entries[position - self.first].visible
            if record is not None:
                records.append(record)
            position += 1
        return records, position

    def record(self, offset: int) -> Record:
        """The committed record at an offset.

        Raises RecordsLost if there is none any more, and DependencyError if there is none yet.
        """
        if self.stable_end <= offset < self.end:
            raise DependencyError(
                f"{self.partition.topic}/{self.partition.number}@{offset} did not come. Was the "
                f"record ever written?"
            )
        if self.first <= offset < self.stable_end:
            record = self._entries[offset - self.first].visible
            if record is not None:
                return record
        raise records_lost(self.partition, offset, (self.first, self.end))

    def offset_at(self, timestamp: float) -> int:
        """The offset of the first committed record at or after a time, or else the end."""
        records, end = self.read(self.first, self.stable_end - self.first)
        return next((one.offset for one in records if one.timestamp >= timestamp), end)

    def check(self, position: int) -> None:
        """Raises RecordsLost if that position can't be read."""
        if not self.first <= position <= self.end:
            raise records_lost(self.partition, position, (self.first, self.end))

    def expire(self, before: int) -> list[Record]:
        """Deletes the records before an offset, as retention does, and returns them."""
        kept = max(self.first, min(before, self.stable_end))
        gone = [entry.visible for entry in self._entries[: kept - self.first]]
        del self._entries[: kept - self.first]
        self.first = kept
        self.wake()
        return [record for record in gone if record is not None]

    def wake(self) -> None:
        """Wakes all readers."""
        for watcher in self.watchers:
            watcher.set()


@dataclass(eq=False, slots=True)
class SoleWriter:
    """The broker's side of a transactional id: only the newest epoch may write."""

    name: str
    epoch: int = 0
    transaction: Transaction | None = None
    """The last transaction: open, or decided and perhaps not marked yet."""

    def fence(self) -> int:
        """Fences the predecessor, ends its last transaction, and returns the new epoch."""
        self.epoch += 1
        self._finish()
        return self.epoch

    def begin(self, epoch: int, transaction: Transaction) -> None:
        """Opens a transaction. Raises Fenced if the epoch is not the newest."""
        self._check(epoch)
        self._finish()
        self.transaction = transaction

    def commit(self, epoch: int) -> Transaction:
        """Commits the open transaction and returns it. Raises Fenced as `begin` does.

        The caller writes its markers a moment later, or the next transaction does.
        """
        self._check(epoch)
        assert self.transaction is not None, f"{self.name} has begun no transaction"
        self.transaction.state = _State.COMMITTED
        return self.transaction

    def abort(self, epoch: int) -> None:
        """Aborts the open transaction. Raises Fenced as `begin` does."""
        self._check(epoch)
        self._finish()

    def time_out(self, transaction: Transaction) -> None:
        """Fences a writer that left its transaction open for too long."""
        if self.transaction is transaction and transaction.state is _State.OPEN:
            self.fence()

    def _finish(self) -> None:
        if self.transaction is not None:
            if self.transaction.state is _State.OPEN:
                self.transaction.state = _State.ABORTED
            self.transaction.mark()
            self.transaction = None

    def _check(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced(
                f"a newer process is the sole writer {self.name!r} now, so this one must end"
            )
