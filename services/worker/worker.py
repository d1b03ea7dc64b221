"""Hosts shards, so that no handler of a stateless worker has to deal with partitions.

A worker shares its main topics with the other members of its consumer group. All state of one
main partition is one shard. A shard is made on assignment, dropped on revocation, and rebuilt by
reading. A shard may have side partitions: partitions that its owner reads without the group, for
example the answers to its requests.

An assignment has two phases. First the worker reads the main partition from the group's commit,
and the side partitions from the positions in the commit's metadata, to the ends that it saw at
the assignment. It sends nothing meanwhile. Then it calls `on_caught_up`: the shard knows all that
its predecessor knew, and may send.

The commit of a partition is its oldest open record, with the positions of the side partitions *at
the moment when that record was first read*: everything that the record caused lies behind these
positions. A record is open until its handler has returned and no shard holds it.

If deaths are counted, the commit also counts the owners that worked on the open records and did not
release the partition cleanly. An owner adds itself before it starts to work, so its successor
knows how many owners may have died of these records. The count ends when everything is done that
was open when the last owner started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from prometheus_client import Gauge

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.broker import (
    Committed,
    End,
    FencedWriter,
    Partition,
    Record,
    Subscription,
)
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Start, Tail, resolve_starts
from headrace.services.worker.commit_metadata import CommitMetadata, read_metadata
from headrace.services.worker.shard import Shard, ShardContext
from headrace.services.worker.shard_host import ShardHost

logger = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0

OPEN = Gauge("headrace_records_open", "Main records read and not done.", ["topic"])
SHARDS = Gauge("headrace_shards", "Partitions held.", ["topic"])

SideStart = Tail | Literal["committed", "first"]
SidePartitions = Callable[[Partition], Mapping[Partition, SideStart]]


@dataclass(frozen=True, slots=True)
class _Assignment:
    """A main partition that was assigned, and what its commit says."""

    partition: Partition
    committed: Committed
    writer: FencedWriter | None
    sides: Mapping[Partition, SideStart]
    noted: Sequence[Partition]
    """The side partitions whose positions are in the commit's metadata."""
    metadata: CommitMetadata

    def begin(self) -> dict[Partition, Start]:
        """Where to begin to read the main partition, and each side partition."""
        begin: dict[Partition, Start] = {self.partition: self.committed.offset}
        for side, start in self.sides.items():
            if start != "committed":
                begin[side] = start
            else:  # Without metadata nobody has worked here yet: read everything.
                begin[side] = self.metadata.positions[side] if self.committed.metadata else "first"
        return begin


@dataclass(eq=False)
class Worker:
    """A member of a consumer group. It hosts one shard for each partition that it is assigned."""

    log: EventLog
    _: KW_ONLY
    topics: Sequence[str]
    """The full names of the main topics."""
    consumer_group: str
    make_shard: Callable[[ShardContext], Shard]
    stopping: asyncio.Event
    side_partitions: SidePartitions = lambda _: {}
    """The side partitions of a main partition, each with where reading begins."""
    fenced: str | None = None
    """The `transactional.id` of the sole writer that the shards send through. Without it they send
    plainly."""
    side_partitions_first: bool = False
    """A shard has caught up as soon as its side partitions have, however much of its main partition
    is unread. This is for a main topic of which memory holds only the beginning."""
    count_deaths: bool = False
    """A shard gets the number of owners that may have died of its open records."""

    changed: Callable[[], None] = lambda: None
    """Called when partitions were assigned or revoked."""

    def __post_init__(self) -> None:
        self._crashed = False
        self._hosts: dict[Partition, ShardHost] = {}
        self._readers: dict[Partition, ShardHost] = {}
        self._failed: asyncio.Future[None] | None = None
        self._subscription: Subscription | None = None
        self._reader = self.log.broker.reader()

    async def run(self) -> None:
        """Works until `stopping` is set, then drains, commits and leaves the group.

        Raises what a handler or a spawned task raised, and DependencyError if the log is gone.
        """
        self._failed = asyncio.get_running_loop().create_future()
        subscription = self._subscription = self.log.broker.subscribe(
            self.topics, self.consumer_group, self._on_assigned, self._on_revoked
        )
        running = [
            asyncio.create_task(self._intake(subscription.read, self._hosts), name="main"),
            asyncio.create_task(
                self._intake(self._reader.read, self._readers), name="side partitions"
            ),
            asyncio.create_task(self._commit_regularly(subscription), name="commits"),
        ]
        stop = asyncio.create_task(self.stopping.wait(), name="stopping")
        try:
            waiting: set[asyncio.Future[Any]] = {*running, stop, self._failed}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        except DependencyError:
            raise
        except BaseException:
            self._crashed = True
            raise
        finally:
            for task in (*running[1:], stop):
                task.cancel()
            try:
                await subscription.close()
            finally:
                running[0].cancel()
                # If the log is gone, closing the subscription releases no partitions.
                left = [self._hosts.pop(each) for each in list(self._hosts)]
                await asyncio.gather(*(host.close(lost=True) for host in left))
                await self._reader.close()
                await asyncio.gather(*running, stop, return_exceptions=True)
                if not self._failed.cancel():
                    self._failed.exception()  # asyncio would complain of an error that nobody read

    def numbers(self, topic: str) -> list[int]:
        """Returns the numbers of the main topic's partitions that this worker has, ascending."""
        return sorted(each.number for each in self._hosts if each.topic == topic)

    def unhandled(self, topic: str) -> int:
        """Returns how many records of the main topic were read and have not reached a shard."""
        return sum(host.unhandled for each, host in self._hosts.items() if each.topic == topic)

    def open_records(self) -> int:
        """Returns how many main records were read and are not done."""
        hosts = self._hosts.values()
        return sum(host.unhandled + len(host.context.open_records) for host in hosts)

    def _fail(self, error: BaseException) -> None:
        """Ends the worker with this error. If there are several, the first one is raised."""
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _intake(
        self,
        read: Callable[[], Coroutine[Any, Any, list[Record | End]]],
        hosts: Mapping[Partition, ShardHost],
    ) -> None:
        while True:
            items = await read()
            # Find the hosts now. A partition that is assigned again while this waits for room is
            # read again from its commit, and must not get what its former shard had fetched.
            owners = {item.partition: hosts.get(item.partition) for item in items}
            for item in items:
                host = owners[item.partition]
                if host is not None:
                    await host.take(item)
            # A batch may have 8 MiB, and the next one may be long in coming.
            items, owners = [], {}

    async def _commit_regularly(self, subscription: Subscription) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            commits = {}
            opened = dict.fromkeys(self.topics, 0)
            for partition, host in self._hosts.items():
                commit = host.to_commit()
                opened[partition.topic] += len(host.context.open_records)
                if commit != host.committed:
                    commits[partition] = commit
            for topic, records in opened.items():
                OPEN.labels(topic).set(records)
            if commits:
                await subscription.commit(commits)
                for partition, commit in commits.items():
                    if (held := self._hosts.get(partition)) is not None:
                        held.committed = commit

    async def _on_assigned(self, assigned: Mapping[Partition, Committed]) -> None:
        """Makes a shard for each partition.

        It looks up the offsets of all partitions together, because the time for an assignment is
        limited, however many partitions it has. Shards start after the last request.
        """
        found = [await self._assignment(*each) for each in assigned.items()]
        begin = {at: start for each in found for at, start in each.begin().items()}
        resolved, ends = await resolve_starts(
            self.log, begin, include_uncommitted=bool(self.fenced)
        )
        hosts = [self._host(each, resolved, ends) for each in found]
        sides = {side: resolved[side] for host in hosts for side in host.side_partitions}
        if sides:
            await self._reader.assign(sides)
        for host in hosts:
            host.pump = host.context.spawn(host.run(), f"shard {host.context.partition.number}")
        self.changed()

    async def _assignment(self, partition: Partition, committed: Committed) -> _Assignment:
        writer = await self.log.broker.fenced(self.fenced) if self.fenced else None
        sides = self.side_partitions(partition)
        noted = [side for side, start in sides.items() if start == "committed"]
        metadata = read_metadata(committed.metadata, noted)
        return _Assignment(partition, committed, writer, sides, noted, metadata)

    def _host(
        self,
        assignment: _Assignment,
        resolved: Mapping[Partition, int],
        ends: Mapping[Partition, int],
    ) -> ShardHost:
        """Makes the shard, and takes what is read for it from now on. It does not run yet."""
        partition, offset = assignment.partition, assignment.committed.offset
        read = (partition, *assignment.sides)
        behind = {each: ends[each] for each in read if resolved[each] < ends[each]}
        if self.side_partitions_first:
            behind.pop(partition, None)
        logger.info("assigned %s/%d from %d", partition.topic, partition.number, offset)
        assert self._subscription is not None
        context = ShardContext(
            self.log,
            self._subscription,
            self._fail,
            partition,
            offset,
            assignment.writer,
            assignment.metadata.owners,
            assignment.metadata.done,
        )
        host = ShardHost(
            self.log,
            context,
            self.make_shard(context),
            {side: resolved[side] for side in assignment.noted},
            behind,
            list(assignment.sides),
            self._subscription.commit if self.count_deaths else None,
            others_end=ends[partition],
        )
        self._hosts[partition] = host
        self._readers |= dict.fromkeys(assignment.sides, host)
        SHARDS.labels(partition.topic).inc()
        return host

    async def _on_revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        hosts = [self._hosts.pop(each) for each in partitions if each in self._hosts]
        self.changed()
        await asyncio.gather(*(self._release(host, lost) for host in hosts))
        return {} if lost else {host.context.partition: host.to_commit() for host in hosts}

    async def _release(self, host: ShardHost, lost: bool) -> None:
        try:
            if host.side_partitions:
                await self._reader.unassign(host.side_partitions)
        except HeadraceError as error:  # the reader has failed, which ends the worker
            logger.warning("can't stop reading for %s: %s", host.context.partition, error)
        await host.close(lost=lost)
        host.released_cleanly = not self._crashed
        for side in host.side_partitions:
            del self._readers[side]
        SHARDS.labels(host.context.partition.topic).dec()
        logger.info("released %s/%d", host.context.partition.topic, host.context.partition.number)
