"""What Headrace asks of a log. Two implementations: Kafka (`client.py`), memory (`memory.py`).

The contract, which `tests/contract/` holds both to:

- `send` returns once the record is durable. Sends of one broker object to one partition keep
  their order, those in flight included.
- A `Reader` yields each partition's records in offset order, only committed ones, and an `End`
  whenever it has read all that there was: offsets may have gaps (transactions leave them).
- A `Subscription` shares a topic's partitions among the members of a consumer group. Before a
  partition is handed over, `on_revoked` runs to its end (bounded); what it commits, counts.
  A member that stays silent past its session loses its partitions, and its commits fail.
- `fenced(name)` cuts off the predecessor of that name: its later writes raise `Fenced`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Headers = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """A topic's partition."""

    topic: str
    number: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record lies."""

    partition: Partition
    offset: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written. `partition` None lets the key decide (murmur2, as Java does)."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers = field(default_factory=list)
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """A record as read. `timestamp` is the broker's or producer's clock, in seconds."""

    partition: Partition
    offset: int
    timestamp: float
    key: bytes | None
    value: bytes | None
    headers: Headers


@dataclass(frozen=True, slots=True)
class End:
    """All records of the partition below `offset` have been read. More may follow later."""

    partition: Partition
    offset: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A consumer group's place: the next offset, and what the owner noted beside it."""

    offset: int
    metadata: str = ""


METADATA_LIMIT = 4_000
"""Bytes of commit metadata that a stock broker takes (measured: 4,096 are refused)."""


class Reader(Protocol):
    """Reads partitions that it is told to, without a consumer group."""

    async def assign(self, positions: Mapping[Partition, int]) -> None:
        """Adds partitions, each from its offset. RecordsLost where the offset is gone."""

    async def unassign(self, partitions: Sequence[Partition]) -> None:
        """Drops partitions: `read` yields nothing of them any more."""

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Holds partitions back until `resume`. What was fetched already may still come."""

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Lets paused partitions flow again."""

    async def read(self) -> list[Record | End]:
        """Waits until there is at least one, and returns what has arrived, bounded."""

    async def close(self) -> None: ...


class Subscription(Protocol):
    """A member of a consumer group on one or more topics."""

    async def read(self) -> list[Record | End]:
        """Waits until there is at least one, and returns what has arrived, bounded.

        Partitions arrive through `on_assigned` first, which says where each is read from.
        The callbacks run whether or not anybody reads. What they raise, and a partition where the
        group has no place (DependencyError), ends the reading: `read` raises it.
        """

    async def pause(self, partitions: Sequence[Partition]) -> None: ...

    async def resume(self, partitions: Sequence[Partition]) -> None: ...

    async def commit(self, commits: Mapping[Partition, Committed]) -> None:
        """Commits for partitions that are held. One that is lost in between is left out.

        HeadraceError where the metadata is too long.
        """

    async def close(self) -> None:
        """Revokes all (with `on_revoked`) and leaves the group."""


OnAssigned = Callable[[Mapping[Partition, Committed]], Awaitable[None]]
"""Told the partitions won, each with the group's place in it. Runs before any of their records."""
OnRevoked = Callable[[Sequence[Partition], bool], Awaitable[Mapping[Partition, Committed]]]
"""Told the partitions lost; returns the last commits. True: lost already, nothing counts now."""


class FencedWriter(Protocol):
    """A sole writer. Made by `Broker.fenced`, which cut off its predecessor."""

    async def write(
        self,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed] | None = None,
        consumer_group: str = "",
    ) -> list[Position]:
        """Writes all records, and the group's places, or nothing: one transaction.

        It is decided when this returns, and seen by readers and `ends` a moment later.

        Raises Fenced where another has taken over, and DependencyError where the outcome is
        unknown: the process must end then, since only a new writer finds out.
        """

    async def close(self) -> None: ...


class Broker(Protocol):
    """A log. Never in a handler's hands."""

    async def send(self, record: Outgoing) -> Position:
        """Writes one record; returns once it is durable. DependencyError after a bounded wait."""

    def reader(self) -> Reader: ...

    def subscribe(
        self,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> Subscription: ...

    async def fenced(self, writer: str) -> FencedWriter:
        """Takes over as the sole writer of that name; the predecessor is cut off on return.

        Then all that it wrote is decided: what is read to the `include_uncommitted` ends now is complete.
        """

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the order asked. RecordsLost if one is gone."""

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Makes the topics that are absent: name to (partitions, configuration).

        UsageError where one exists with another number of partitions.
        """

    async def delete_topics(self, topics: Sequence[str]) -> None:
        """Removes the topics that exist."""

    async def list_topics(self) -> dict[str, int]:
        """Every topic's number of partitions, by name."""

    async def topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The configuration of these topics, in Kafka's names. DependencyError where one is not."""

    async def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool = False
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset, and the one where all that is committed ends.

        The latter is where `End` comes. A gap may lie before it, and an open transaction at it,
        with records behind that are committed and not seen yet: `include_uncommitted` asks for the end of
        those too, where `End` comes once the transaction is decided.
        """

    async def offsets_at(
        self, partitions: Sequence[Partition], timestamp: float
    ) -> dict[Partition, int]:
        """The offset of each partition's first record that is no older; its end without one.

        `timestamp` is in epoch seconds. Records' times need not ascend: some after it may be older.
        """

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's places; a partition without one is absent."""

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 where the group has no place yet. Only while the group has no member."""

    async def close(self) -> None:
        """Flushes, bounded, and closes what it opened."""
