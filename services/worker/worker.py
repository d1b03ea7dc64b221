"""Hosts shards: what every stateless worker does about partitions, so that no handler has to.

A worker shares its main topics with the other members of its consumer group. All state of one
main partition is one shard: made on assignment, dropped on revocation, rebuilt by reading. A
shard may have companions: partitions that its owner reads by itself, such as the answers to what
it asked.

Take-over has two phases. First the main partition is read from the group's commit, and the
companions from the positions noted beside it, to the ends seen at assignment; nothing is sent.
Then `on_caught_up` says that the shard knows all that its predecessor knew, and may send.

The commit of a partition is its oldest record that is not done, with the companions' positions
*as they stood when that record was first read*: what it caused lies after them. A record is done
when its handler has returned, unless the shard holds it.

Where deaths are counted, the commit also notes how many owners have worked on what is open and not
handed it over in order. A shard's owner notes itself before it begins to work. So the next one
knows how many died of it, perhaps, until all that was open as the last one began is done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from prometheus_client import Gauge

from headrace.errors import DependencyError
from headrace.services.kafka.broker import Committed, End, Partition, Record, Subscription
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Start, resolve_starts
from headrace.services.worker.commit_metadata import read_note
from headrace.services.worker.open_records import OpenRecords
from headrace.services.worker.shard import Shard, ShardContext
from headrace.services.worker.shard_host import ShardHost

logger = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0

OPEN = Gauge("headrace_records_open", "Main records read and not done.", ["topic"])
SHARDS = Gauge("headrace_shards", "Partitions held.", ["topic"])

SideStart = Literal["committed", "first", "tail"]
SidePartitions = Callable[[Partition], Mapping[Partition, SideStart]]


def _no_side_partitions(_: Partition) -> Mapping[Partition, SideStart]:
    return {}


class Worker:
    """A member of a consumer group that hosts one shard for each partition it is given."""

    def __init__(
        self,
        log: EventLog,
        *,
        topics: Sequence[str],
        consumer_group: str,
        make_shard: Callable[[ShardContext], Shard],
        stopping: asyncio.Event,
        side_partitions: SidePartitions = _no_side_partitions,
        fenced: str | None = None,
        side_partitions_first: bool = False,
        count_deaths: bool = False,
    ) -> None:
        """`fenced` names the sole writer that a shard's sends go through; None sends plainly.

        With `side_partitions_first` a shard is caught up once its companions are, wherever its main
        partition stands: for a main topic of which only the beginning is wanted in memory.
        With `count_deaths` a shard is told how many owners may have died of what it takes up.
        """
        self.log = log
        self._topics = tuple(topics)
        self._consumer_group = consumer_group
        self._make_shard = make_shard
        self._side_partitions = side_partitions
        self._fenced = fenced
        self._side_partitions_first = side_partitions_first
        self._count_deaths = count_deaths
        self._crashed = False
        self._stopping = stopping
        self._hosts: dict[Partition, ShardHost] = {}
        self._readers: dict[Partition, ShardHost] = {}
        self._failed: asyncio.Future[None] | None = None
        self._subscription: Subscription | None = None
        self._reader = log.broker.reader()

    async def run(self) -> None:
        """Works until `stopping` is set; then drains, commits and leaves the group.

        Raises what a handler or spawned task raised; DependencyError where the log is gone.
        """
        self._failed = asyncio.get_running_loop().create_future()
        self._subscription = self.log.broker.subscribe(
            self._topics, self._consumer_group, self._on_assigned, self._on_revoked
        )
        running = [
            asyncio.create_task(self._intake(self._subscription.read, self._hosts), name="main"),
            asyncio.create_task(self._intake(self._reader.read, self._readers), name="companions"),
            asyncio.create_task(self._commit_regularly(), name="commits"),
        ]
        stop = asyncio.create_task(self._stopping.wait(), name="stopping")
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
                await self._subscription.close()
            finally:
                running[0].cancel()
                await self._reader.close()
                await asyncio.gather(*running, stop, return_exceptions=True)
                if not self._failed.cancel():
                    self._failed.exception()  # heard, though another end came first

    def fail(self, error: BaseException) -> None:
        """Ends the worker with this error; the first one counts."""
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)

    async def pause(self, partition: Partition) -> None:
        """Holds a main partition back."""
        assert self._subscription is not None
        await self._subscription.pause([partition])

    async def resume(self, partition: Partition) -> None:
        """Lets a main partition flow again."""
        assert self._subscription is not None
        await self._subscription.resume([partition])

    async def _intake(
        self,
        read: Callable[[], Coroutine[Any, Any, list[Record | End]]],
        hosts: Mapping[Partition, ShardHost],
    ) -> None:
        while True:
            items = await read()
            # Whose they are is settled now: a partition that comes back while this waits for room
            # is read anew from its commit, and must not get what its former shard had fetched.
            owners = {item.partition: hosts.get(item.partition) for item in items}
            for item in items:
                host = owners[item.partition]
                if host is not None:
                    await host.take(item)

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            places = {}
            for partition, host in self._hosts.items():
                place = host.place()
                OPEN.labels(partition.topic).set(len(host.open_records))
                if place != host.committed:
                    places[partition] = place
            if places:
                assert self._subscription is not None
                await self._subscription.commit(places)
                for partition, place in places.items():
                    if (held := self._hosts.get(partition)) is not None:
                        held.committed = place

    async def _commit_now(self, partition: Partition, place: Committed) -> None:
        assert self._subscription is not None
        await self._subscription.commit({partition: place})

    async def _on_assigned(self, places: Mapping[Partition, Committed]) -> None:
        for partition, committed in places.items():
            await self._take_over(partition, committed)

    async def _take_over(self, partition: Partition, committed: Committed) -> None:
        writer = await self.log.broker.fenced(self._fenced) if self._fenced else None
        starts = self._side_partitions(partition)
        noted = [place for place, start in starts.items() if start == "committed"]
        note = read_note(committed.metadata, noted)
        begin: dict[Partition, Start] = {partition: committed.offset}
        for place, start in starts.items():
            if start != "committed":
                begin[place] = start
            else:  # Where nothing is noted, nobody has worked here yet: all that there is.
                begin[place] = note.positions[place] if committed.metadata else "first"
        resolved, ends = await resolve_starts(
            self.log, begin, include_uncommitted=writer is not None
        )
        positions = {place: resolved[place] for place in noted}
        behind = {place: end for place, end in ends.items() if resolved[place] < end}
        if self._side_partitions_first:
            behind.pop(partition, None)
        logger.info("take over %s/%d from %d", partition.topic, partition.number, committed.offset)
        open_records = OpenRecords()
        context = ShardContext(self, partition, open_records, writer, note.owners)
        context.begins_at = resolved[partition]
        shard = self._make_shard(context)
        side_partitions = list(starts)
        host = ShardHost(
            self.log,
            context,
            shard,
            committed.offset,
            positions,
            behind,
            side_partitions,
            open_records,
            writer,
            partial(self._commit_now, partition) if self._count_deaths else None,
        )
        self._hosts[partition] = host
        self._readers |= dict.fromkeys(side_partitions, host)
        SHARDS.labels(partition.topic).inc()
        if side_partitions:
            await self._reader.assign({place: resolved[place] for place in side_partitions})
        host.pump = asyncio.create_task(host.run(), name=f"shard {partition.number}")
        host.pump.add_done_callback(self._on_pump_done)

    def _on_pump_done(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self.fail(error)

    async def _on_revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        hosts = [self._hosts.pop(place) for place in partitions if place in self._hosts]
        await asyncio.gather(*(self._release(host, lost) for host in hosts))
        return {} if lost else {host.context.partition: host.place() for host in hosts}

    async def _release(self, host: ShardHost, lost: bool) -> None:
        if host.side_partitions:
            await self._reader.unassign(host.side_partitions)
        await host.close(lost=lost)
        host.handed_over = not self._crashed
        for place in host.side_partitions:
            del self._readers[place]
        if host.writer is not None:
            await host.writer.close()
        SHARDS.labels(host.context.partition.topic).dec()
        logger.info("released %s/%d", host.context.partition.topic, host.context.partition.number)
