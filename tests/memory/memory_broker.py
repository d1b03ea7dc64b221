"""A log in memory that behaves like Kafka, for tests and the seeded simulation.

It is pure asyncio, with no threads and no clock but the event loop's, so a run with the same seed
repeats to the last offset. It models gaps at the ends of transactions, the last stable offset,
fenced writers, sessions and cooperative rebalancing. It does not model Kafka's limits (message
sizes, retention, quotas) or topic configuration, and loses everything when the process ends.

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
from tests.memory.memory_faults import Faults
from tests.memory.memory_process import (
    DELIVERY_S,
    MemoryProcess,
    retrieve_exception,
)
from tests.memory.memory_reading import MemoryReader, MemorySubscription
from tests.memory.memory_state import State

logger = logging.getLogger(__name__)

SESSION_S = 6.0
"""A member of a consumer group that is silent for this long loses its partitions."""
FETCH_S = 10.0
"""How long a fetch waits for records in open transactions."""
CLOSE_S = 3.0
"""How long `close` waits for records in flight."""


class MemoryCluster:
    """What several processes share: topics, consumer groups, sole writers."""

    def __init__(self, *, session_s: float = SESSION_S, faults: Faults | None = None) -> None:
        """`faults` makes the connections of all clients slow and unreliable; None means neither."""
        self.state = State()
        self.session_s = session_s
        self.faults = faults or Faults()
        self.context = copy_context()
        self._processes: list[MemoryProcess] = []

    def client(self, name: str, faults: Faults | None = None) -> MemoryBroker:
        """The broker object of one more process. `faults` replaces the cluster's for it."""
        return MemoryBroker(self, name, faults)

    def add_process(self, name: str, faults: Faults | None = None) -> MemoryProcess:
        """Connects one more process."""
        self._processes = [process for process in self._processes if not process.gone]
        faults = faults or self.faults
        process = MemoryProcess(name, self.session_s, self.state, faults, self.context)
        self._processes.append(process)
        return process

    def expire(self, partition: Partition, before: int) -> list[Record]:
        """Deletes a partition's records before an offset, as retention does, and returns them."""
        return self.state.log(partition).expire(before)

    def outage(self, seconds: float) -> None:
        """Makes the log answer no requests for some seconds, as during a restart.

        After the delivery time-out, clients fail the requests that still wait.
        """
        self.state.stop_answering(seconds)
        if seconds > DELIVERY_S:
            loop = asyncio.get_running_loop()
            for process in self._processes:
                loop.call_later(DELIVERY_S, process.give_up)

    def rebalance(self) -> None:
        """Assigns every group's partitions at random."""
        for group in self.state.groups():
            group.shuffle(self.faults.random)


class MemoryBroker(Broker):
    """The broker object of one process."""

    def __init__(
        self,
        cluster: MemoryCluster | None = None,
        name: str = "memory",
        faults: Faults | None = None,
    ) -> None:
        """Without `cluster`, it creates one of its own."""
        cluster = cluster or MemoryCluster()
        self._state = cluster.state
        self._process = cluster.add_process(name, faults)
        self._opened: list[MemoryReader | MemorySubscription | MemoryFencedWriter] = []

    def freeze(self) -> None:
        """Stops the process, as SIGSTOP does: it is silent, and its sessions expire."""
        self._process.freeze()

    def thaw(self) -> None:
        """Continues the process, as SIGCONT does. It may be a zombie by then."""
        self._process.thaw()

    def kill(self) -> None:
        """Ends the process, as SIGKILL does. Requests in flight may or may not arrive."""
        self._process.kill()

    def lose_sessions(self, blind_s: float) -> None:
        """Its consumer groups expel it now. It learns that after `blind_s` and reads until then."""
        self._process.lose_sessions(blind_s)

    async def send(self, record: Outgoing) -> Position:
        """See Broker."""
        lane = self._state.route(record).partition
        return await self._process.send(lambda: self._state.append(record), lane)

    def prepare_sends(self, *, gathered: bool) -> None:
        """Sends need no connection here."""

    def reader(self) -> Reader:
        """See Broker."""
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
        """See Broker."""
        subscription = MemorySubscription(
            self._process, self._state, topics, consumer_group, on_assigned, on_revoked
        )
        self._opened.append(subscription)
        return subscription

    async def fenced(self, writer: str) -> FencedWriter:
        """See Broker."""
        epoch = await self._process.call(lambda: self._state.fence(writer), writer)
        fenced = MemoryFencedWriter(self._process, self._state, writer, epoch)
        self._opened.append(fenced)
        return fenced

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """See Broker."""
        await self._process.turn()
        await self._state.decided(positions, FETCH_S)
        return await self._process.call(
            lambda: [self._state.log(at.partition).record(at.offset) for at in positions]
        )

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """See Broker."""
        await self._process.call(lambda: self._state.create_topics(topics))

    async def delete_topics(self, topics: Sequence[str]) -> None:
        """See Broker."""
        await self._process.call(lambda: self._state.delete_topics(topics))

    async def list_topics(self) -> dict[str, int]:
        """See Broker."""
        return await self._process.call(
            lambda: {name: len(logs) for name, logs in self._state.topics.items()}
        )

    async def cluster_id(self) -> str:
        """See Broker."""
        return await self._process.call(lambda: "memory")

    async def sees_all_topics(self) -> bool:
        """See Broker."""
        return await self._process.call(lambda: True)

    async def topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """See Broker."""
        return await self._process.call(lambda: self._state.settings(topics))

    async def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool = False
    ) -> dict[Partition, tuple[int, int]]:
        """See Broker."""
        return await self._process.call(
            lambda: self._state.ends(partitions, include_uncommitted=include_uncommitted)
        )

    async def offsets_at(
        self, partitions: Sequence[Partition], timestamp: float
    ) -> dict[Partition, int]:
        """See Broker."""
        return await self._process.call(
            lambda: {at: self._state.log(at).offset_at(timestamp) for at in partitions}
        )

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """See Broker."""
        return await self._process.call(lambda: self._state.committed(consumer_group, partitions))

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """See Broker."""
        await self._process.call(lambda: self._state.commit_first(consumer_group, partitions))

    async def members(self, consumer_group: str) -> int:
        """See Broker."""
        return await self._process.call(lambda: len(self._state.group(consumer_group).members))

    async def close(self) -> None:
        """See Broker."""
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


class MemoryFencedWriter(FencedWriter):
    """A sole writer. It runs one transaction at a time."""

    def __init__(self, process: MemoryProcess, state: State, writer: str, epoch: int) -> None:
        self._process = process
        self._state = state
        self._writer = writer
        self._epoch = epoch
        self._faults = process.faults
        self._turn = asyncio.Lock()
        self._closed = False
        self._broken: DependencyError | None = None

    async def write(self, records: Sequence[Outgoing]) -> list[Position]:
        """See FencedWriter."""
        if self._closed:
            raise DependencyError(f"the writer {self._writer} is closed")
        if not records:
            return []
        writing = asyncio.create_task(self._write(list(records)))
        writing.add_done_callback(retrieve_exception)
        return await asyncio.shield(writing)

    async def close(self) -> None:
        """See FencedWriter."""
        self._closed = True
        async with self._turn:
            pass

    async def _write(self, records: Sequence[Outgoing]) -> list[Position]:
        async with self._turn:
            if self._broken is not None:
                raise DependencyError(str(self._broken))
            positions = await self._begin(records)
            while self._faults.hit(self._faults.aborts):
                abort = partial(self._state.abort, self._writer, self._epoch)
                await self._process.call(abort, self._writer)
                positions = await self._begin(records)
            await self._commit()
            return positions

    async def _begin(self, records: Sequence[Outgoing]) -> list[Position]:
        begin = partial(self._state.begin, self._writer, self._epoch, records)
        return await self._process.call(begin, self._writer)

    async def _commit(self) -> None:
        """Commits. If the outcome stays unknown, this writer fails from then on."""
        commit = partial(self._state.commit, self._writer, self._epoch)
        unknown = self._faults.hit(self._faults.unknown_commits)
        if not unknown or self._faults.hit(0.5):
            await self._process.call(commit, self._writer)
        if unknown:
            self._broken = DependencyError(
                f"the writer {self._writer} could not learn whether its transaction was "
                f"committed. This process must end; a new one finds out"
            )
            await asyncio.sleep(self._faults.fail_s)
            raise self._broken
