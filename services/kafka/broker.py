"""What Headrace requires of a log: a contract, which `tests/contract/` checks.

Kafka (`kafka_broker.py`) and the in-memory log of the tests (`tests/memory/`) implement it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from headrace.errors import RecordsLost
from headrace.schemas.topics import MAX_RECORD_BYTES
from headrace.schemas.topics import Partition as Partition

Headers = list[tuple[str, bytes]]
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES + 60 * 1024
"""The most bytes of a record that is sent: of its key, its value and its headers. New topics accept
4 KiB more, for what Kafka adds."""


class Position(NamedTuple):
    """The partition and offset of a record."""

    partition: Partition
    offset: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written. If `partition` is None, the key decides (murmur2, as in Java)."""

    topic: str
    key: bytes
    value: bytes
    headers: Headers = field(default_factory=list)
    partition: int | None = None
    gathered: bool = False
    """Whether it always waits a few milliseconds for others, so that fewer requests are sent. Other
    records may wait, too, while processors are scarce."""
    patient: bool = False
    """Whether its sender may learn a moment later than necessary that it is durable. A process that
    also reads then has less to do."""

    @property
    def size(self) -> int:
        """About how many bytes it takes in a request."""
        headers = sum(len(name.encode()) + len(value) + 10 for name, value in self.headers)
        return len(self.key) + len(self.value) + headers


class Permission(NamedTuple):
    """One operation that a principal may do on one resource, from any host."""

    principal: str
    """For example `User:headrace-agent`."""
    resource: Literal["TOPIC", "GROUP", "TRANSACTIONAL_ID"]
    name: str
    """The whole name of the resource."""
    operation: str
    """In Kafka's words, for example `READ`."""


class Record(NamedTuple):
    """A record as read. `timestamp` is in epoch seconds, by the broker's or producer's clock."""

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
    """A consumer group's commit for a partition: the next offset, and the owner's metadata."""

    offset: int
    metadata: str = ""


METADATA_LIMIT = 4_000
"""Bytes of commit metadata that a stock broker accepts (measured: it refuses 4,096)."""


class Reader(Protocol):
    """Reads given partitions, without a consumer group.

    It yields each partition's records in offset order, only committed ones, and an `End` whenever
    it has read all that exist. Offsets may have gaps: transaction markers take offsets.
    """

    async def assign(self, positions: Mapping[Partition, int]) -> None:
        """Adds partitions, each from its offset. Raises RecordsLost if the offset is gone."""

    async def unassign(self, partitions: Sequence[Partition]) -> None:
        """Removes partitions: `read` returns none of their items any more."""

    async def read(self) -> list[Record | End]:
        """Waits for at least one item, and returns all that have arrived, bounded."""

    async def close(self) -> None:
        """Stops reading."""


class Subscription(Protocol):
    """A member of a consumer group, which shares the partitions of topics among its members.

    Before a partition moves to another member, `on_revoked` runs to its end (bounded), and the
    offsets that it returns are committed. A member that is silent for longer than its session
    loses its partitions, and its commits fail.
    """

    async def read(self) -> list[Record | End]:
        """Waits for at least one item, and returns all that have arrived, bounded.

        `on_assigned` runs before the first record of a partition, and gets the offset that reading
        starts at. The callbacks run whether or not `read` is called. If a callback raises, or the
        group has no commit for a partition (DependencyError), `read` raises that error.
        """

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Stops fetching from partitions until `resume`. Records already fetched may still come."""

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Fetches from paused partitions again."""

    async def commit(self, commits: Mapping[Partition, Committed]) -> None:
        """Commits for partitions that this member holds. Leaves out those lost meanwhile.

        Raises HeadraceError if the metadata is too long.
        """

    async def close(self) -> None:
        """Revokes all partitions (with `on_revoked`) and leaves the group."""


OnAssigned = Callable[[Mapping[Partition, Committed]], Awaitable[None]]
"""Gets newly assigned partitions, each with the group's commit. Runs before their records."""
OnRevoked = Callable[[Sequence[Partition], bool], Awaitable[Mapping[Partition, Committed]]]
"""Gets revoked partitions, and True if they are lost already; returns the last commits, which
count only if they are not."""


class FencedWriter(Protocol):
    """A sole writer. `Broker.fenced` makes it and fences its predecessor."""

    async def write(self, records: Sequence[Outgoing]) -> list[Position]:
        """Writes all records or none, in one transaction.

        The transaction is decided when this returns; readers and `ends` see it a moment later.

        Raises Fenced if a successor exists, and DependencyError if the outcome is unknown. The
        process must end then, since only a new writer can find the outcome out. A write that is
        cancelled still runs to its end.
        """

    async def close(self) -> None:
        """Waits for the running transaction, if there is one."""


class Broker(Protocol):
    """A log. Handlers never get one."""

    async def send(self, record: Outgoing) -> Position:
        """Writes one record; returns once it is durable. DependencyError after a bounded wait.

        Records that one broker object sends to one partition keep their order, also while they are
        in flight.
        """

    def prepare_sends(self, *, gathered: bool) -> None:
        """Connects what records need that are gathered or not, so that the first need not wait."""

    def reader(self) -> Reader:
        """A reader of given partitions."""

    def subscribe(
        self,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> Subscription:
        """Joins a consumer group. Call it in the event loop; the callbacks run there."""

    async def fenced(self, writer: str) -> FencedWriter:
        """Becomes the sole writer of that name; its predecessor is fenced on return.

        By then all transactions of the predecessor are decided: a reader that goes to the
        `include_uncommitted` ends of now reads all that it wrote.
        """

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the given order. RecordsLost if one is gone."""

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Creates the topics that do not exist: name to (partitions, configuration).

        Returns once all can be written to.

        Raises UsageError if one exists with another number of partitions.
        """

    async def delete_topics(self, topics: Sequence[str]) -> None:
        """Deletes the topics that exist. Returns once they are gone."""

    async def list_topics(self) -> dict[str, int]:
        """The number of partitions of every topic but Kafka's own, by name."""

    async def cluster_id(self) -> str:
        """The cluster's own id. Clusters with other records have other ids."""

    async def sees_all_topics(self) -> bool:
        """Whether `list_topics` leaves out no topic because of ACLs. False if it is unknown."""

    async def topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The configuration of these topics, by Kafka's names. DependencyError if one is absent."""

    async def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool = False
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset, and the end of its committed records, where `End` comes.

        Transaction markers may lie before the end. At the end an open transaction may begin, with
        committed records after it that readers do not see yet. `include_uncommitted` returns the
        end of those records too; `End` comes there once the transaction is decided.
        """

    async def offsets_at(
        self, partitions: Sequence[Partition], timestamp: float
    ) -> dict[Partition, int]:
        """The offset of each partition's first record at or after a time, or else its end.

        `timestamp` is in epoch seconds. The times of records need not ascend: later records may
        be older.
        """

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's commits. A partition without one is absent."""

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 for partitions without a commit. The group must have no member."""

    async def members(self, consumer_group: str) -> int:
        """The number of the group's members. One that was killed counts until its session ends."""

    async def close(self) -> None:
        """Waits, bounded, for what is in flight, and closes everything that it opened."""


_TO_DO = "Section `Records that are gone` of docs/operations.md says what to do"


def records_lost(
    partition: Partition, offset: int | None, bounds: tuple[int, int] | None, reader: str = ""
) -> RecordsLost:
    """The error to raise for an offset that can't be read.

    `bounds` are the partition's first offset and its end, or None if they are unknown. `reader` is
    the consumer group that needs the offset, or empty for a reference.
    """
    name = f"{partition.topic}/{partition.number}"
    who = f"{reader} continues at" if reader else "the reader needs"
    if offset is None or bounds is None:
        wanted = "an offset" if offset is None else f"offset {offset}"
        return RecordsLost(f"{name}: {who} {wanted}, which the log does not hold. {_TO_DO}")
    first, end = bounds
    if offset < first:
        lost, why = (offset, first - 1), f"older records than {first} were deleted"
    elif offset == end:
        lost, why = (offset, offset), f"the log ends at {end}; the record was never written"
    elif offset > end:
        lost, why = (end, offset - 1), f"the log ends at {end}; was the topic created again?"
    else:
        lost, why = (offset, offset), f"the log holds {first} to {end}, with a gap there"
    count = lost[1] - lost[0] + 1
    return RecordsLost(
        f"{name}: {count:,} {'record is' if count == 1 else 'records are'} lost, offsets "
        f"{lost[0]} to {lost[1]}: {who} {offset}, but {why}. {_TO_DO}"
    )
