"""The log in memory: Kafka's in-memory twin, for tests and the seeded simulation.

Pure asyncio, no threads, no clock but the event loop's: the same run twice is the same to the
last offset. It keeps Kafka's ways: gaps where transactions end, the last stable offset, fenced
writers, sessions, cooperative hand-over. It does not keep Kafka's limits (message sizes,
retention, quotas), topic configuration, or anything once the process ends.

    cluster = MemoryCluster()
    one, other = cluster.client("one"), cluster.client("other")     # two processes
    one.freeze(); one.thaw(); other.kill()                          # SIGSTOP, SIGCONT, SIGKILL
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from functools import partial

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.broker import (
    Broker,
    Committed,
    FencedWriter,
    OnAssigned,
    OnRevoked,
    Outgoing,
    Partition,
    Position,
    Reader,
    Record,
    Subscription,
)
from headrace.services.kafka.memory.memory_faults import Faults
from headrace.services.kafka.memory.memory_process import DELIVERY_S, MemoryProcess, heard
from headrace.services.kafka.memory.memory_reading import MemoryReader, MemorySubscription
from headrace.services.kafka.memory.memory_state import State

logger = logging.getLogger(__name__)

SESSION_S = 6.0
"""A member of a consumer group that is silent for so long loses its partitions."""
FETCH_S = 10.0
"""Seconds that a fetch waits for records that are not decided yet."""
CLOSE_S = 3.0
"""Seconds that records in flight have at the end."""


class MemoryCluster:
    """What several processes share: topics, groups, sole writers."""

    def __init__(self, *, session_s: float = SESSION_S, faults: Faults | None = None) -> None:
        """`faults` says how slow and how unreliable the way to the log is; None is neither."""
        self.state = State()
        self.session_s = session_s
        self.faults = faults or Faults()
        self.surroundings = copy_context()
        self._processes: list[MemoryProcess] = []

    def client(self, name: str, faults: Faults | None = None) -> MemoryBroker:
        """The log as one more process sees it; with faults of its own, if it has some."""
        return MemoryBroker(self, name, faults)

    def add_process(self, name: str, faults: Faults | None = None) -> MemoryProcess:
        """One more process's line to the log."""
        self._processes = [process for process in self._processes if not process.gone]
        faults = faults or self.faults
        process = MemoryProcess(name, self.session_s, self.state, faults, self.surroundings)
        self._processes.append(process)
        return process

    def expire(self, partition: Partition, before: int) -> list[Record]:
        """Deletes a partition's records before an offset, as retention does, and returns them."""
        return self.state.log(partition).expire(before)

    def outage(self, seconds: float) -> None:
        """Restarts the log: for so long it answers nobody. A client that waits longer than its
        delivery time-out gives up what it has under way."""
        self.state.go_away(seconds)
        if seconds > DELIVERY_S:
            loop = asyncio.get_running_loop()
            for process in self._processes:
                loop.call_later(DELIVERY_S, process.give_up)

    def rebalance(self) -> None:
        """Shares every group's partitions anew, by chance."""
        for group in self.state.groups():
            group.shuffle(self.faults.random)


class MemoryBroker:
    """The log, as one process sees it."""

    def __init__(
        self,
        cluster: MemoryCluster | None = None,
        name: str = "memory",
        faults: Faults | None = None,
    ) -> None:
        """Without a cluster it has one to itself."""
        cluster = cluster or MemoryCluster()
        self._state = cluster.state
        self._process = cluster.add_process(name, faults)
        self._opened: list[MemoryReader | MemorySubscription | MemoryFencedWriter] = []

    def freeze(self) -> None:
        """Stops the process, as SIGSTOP does: it falls silent, and its sessions run out."""
        self._process.freeze()

    def thaw(self) -> None:
        """Lets it run on, as SIGCONT does: a zombie, perhaps."""
        self._process.thaw()

    def kill(self) -> None:
        """Ends the process, as SIGKILL does: what is in flight may have landed, or never will."""
        self._process.kill()

    def lose_sessions(self, blind_s: float) -> None:
        """Its consumer groups expel it; it reads on, and hears of that after `blind_s`."""
        self._process.lose_sessions(blind_s)

    async def send(self, record: Outgoing) -> Position:
        """Writes one record; returns once it is durable."""
        lane = self._state.route(record).partition
        return await self._process.send(lambda: self._state.append(record), lane)

    def reader(self) -> Reader:
        """A reader of partitions that it is told."""
        reader = MemoryReader(self._process, self._state)
        self._opened.append(reader)
        return reader

    def subscribe(
        self,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> Subscription:
        """Joins a consumer group. Called in the event loop."""
        subscription = MemorySubscription(
            self._process, self._state, topics, consumer_group, on_assigned, on_revoked
        )
        self._opened.append(subscription)
        return subscription

    async def fenced(self, writer: str) -> FencedWriter:
        """Takes over as the sole writer of that name; the predecessor is cut off on return."""
        epoch = await self._process.call(lambda: self._state.take_over(writer), writer)
        fenced = MemoryFencedWriter(self._process, self._state, writer, epoch)
        self._opened.append(fenced)
        return fenced

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the order asked. RecordsLost if one is gone."""
        await self._process.turn()
        await self._state.decided(positions, FETCH_S)
        return await self._process.call(
            lambda: [self._state.log(at.partition).record(at.offset) for at in positions]
        )

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Makes the topics that are absent: name to (partitions, configuration).

        UsageError where one exists with another number of partitions.
        """
        await self._process.call(lambda: self._state.create_topics(topics))

    async def delete_topics(self, topics: Sequence[str]) -> None:
        """Removes the topics that exist."""
        await self._process.call(lambda: self._state.delete_topics(topics))

    async def list_topics(self) -> dict[str, int]:
        """Every topic's number of partitions, by name."""
        return await self._process.call(
            lambda: {name: len(logs) for name, logs in self._state.topics.items()}
        )

    async def topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The configuration that these topics were made with: nothing here heeds it."""
        return await self._process.call(lambda: self._state.settings(topics))

    async def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool = False
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset and the end of what is committed; or of all."""
        return await self._process.call(
            lambda: self._state.ends(partitions, include_uncommitted=include_uncommitted)
        )

    async def offsets_at(
        self, partitions: Sequence[Partition], timestamp: float
    ) -> dict[Partition, int]:
        """The offset of each partition's first record that is no older; its end without one."""
        return await self._process.call(
            lambda: {at: self._state.log(at).offset_at(timestamp) for at in partitions}
        )

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's places; a partition without one is absent."""
        return await self._process.call(lambda: self._state.committed(consumer_group, partitions))

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 where the group has no place yet. Only while the group has no member."""
        await self._process.call(lambda: self._state.commit_first(consumer_group, partitions))

    async def close(self) -> None:
        """Waits, bounded, for what is in flight, and closes what it opened."""
        if self._process.gone:
            return
        opened, self._opened = self._opened, []
        await self._process.flush(CLOSE_S)
        closing = [one.close() for one in opened]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, HeadraceError):
                logger.warning("while closing: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        self._process.end(f"{self._process.name} is closed")


class MemoryFencedWriter:
    """A sole writer. Its writes follow one after the other."""

    def __init__(self, process: MemoryProcess, state: State, writer: str, epoch: int) -> None:
        self._process = process
        self._state = state
        self._writer = writer
        self._epoch = epoch
        self._faults = process.faults
        self._turn = asyncio.Lock()
        self._closed = False
        self._broken: DependencyError | None = None

    async def write(
        self,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed] | None = None,
        consumer_group: str = "",
    ) -> list[Position]:
        """Writes all records, and the group's places, or nothing: one transaction.

        A write that is cancelled still runs to its end.
        """
        if self._closed:
            raise DependencyError(f"the writer {self._writer} is closed")
        if not records and not commits:
            return []
        writing = asyncio.create_task(
            self._write(list(records), dict(commits or {}), consumer_group)
        )
        writing.add_done_callback(heard)
        return await asyncio.shield(writing)

    async def close(self) -> None:
        """Waits for the transaction that runs, if one does."""
        self._closed = True
        async with self._turn:
            pass

    async def _write(
        self,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed],
        consumer_group: str,
    ) -> list[Position]:
        async with self._turn:
            if self._broken is not None:
                raise DependencyError(str(self._broken))
            work = (records, commits, consumer_group)
            positions = await self._begin(*work)
            while self._faults.hit(self._faults.aborts):
                abort = partial(self._state.abort, self._writer, self._epoch)
                await self._process.call(abort, self._writer)
                positions = await self._begin(*work)
            await self._commit()
            return positions

    async def _begin(
        self,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed],
        consumer_group: str,
    ) -> list[Position]:
        begin = partial(
            self._state.begin, self._writer, self._epoch, records, commits, consumer_group
        )
        return await self._process.call(begin, self._writer)

    async def _commit(self) -> None:
        """Commits. An outcome that stays unknown breaks the writer: only a new one finds out."""
        commit = partial(self._state.commit, self._writer, self._epoch)
        unknown = self._faults.hit(self._faults.unknown_commits)
        if not unknown or self._faults.hit(0.5):
            await self._process.call(commit, self._writer)
        if unknown:
            self._broken = DependencyError(
                f"the writer {self._writer} does not know whether its transaction counts: this "
                f"process must end; a new one finds out"
            )
            await asyncio.sleep(self._faults.fail_s)
            raise self._broken


def _keeps_the_contract(broker: MemoryBroker) -> Broker:
    """For mypy: a MemoryBroker is a Broker."""
    return broker
