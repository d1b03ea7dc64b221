"""All that the in-memory log's processes share, and the processes' line to it.

`State` is the cluster: topics, consumer groups, sole writers. A `Process` reaches it by `call`
alone, as if over a wire: a request lands on a later turn of the event loop, in the order in which
the process made them, and the answer takes another turn. So a process that is killed may leave
requests behind that have landed and others that never will, and one that is frozen falls silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from services.clock import now
from services.errors import DependencyError, HeadraceError, UsageError
from services.kafka.broker import Committed, Outgoing, Partition, Position
from services.kafka.memory_group import Group, Member, check_metadata
from services.kafka.memory_log import PartitionLog, SoleWriter, Transaction
from services.kafka.murmur2 import partition_of

TRANSACTION_S = 10.0
"""Seconds that a transaction may be open."""
MARKING_S = 0.001
"""Seconds from a commit until its markers are written."""

R = TypeVar("R")


class State:
    """The cluster."""

    def __init__(self) -> None:
        self.topics: dict[str, list[PartitionLog]] = {}
        self._groups: dict[str, Group] = {}
        self._writers: dict[str, SoleWriter] = {}

    def create_topics(self, topics: Mapping[str, int]) -> None:
        """Makes the topics that are absent: name to number of partitions."""
        for name, partitions in topics.items():
            logs = [PartitionLog(Partition(name, number)) for number in range(partitions)]
            there = len(self.topics.setdefault(name, logs))
            if there != partitions:
                raise UsageError(
                    f"the topic {name} has {there} partitions, not {partitions}: their number is "
                    f"fixed when a namespace is made. Use it, or another namespace"
                )

    def delete_topics(self, topics: Sequence[str]) -> None:
        """Removes topics, and the groups' places in them."""
        for name in topics:
            for log in self.topics.pop(name, []):
                for group in self._groups.values():
                    group.places.pop(log.partition, None)
                log.wake()

    def log(self, partition: Partition) -> PartitionLog:
        """A partition's records. DependencyError where there is no such partition."""
        logs = self.topics.get(partition.topic)
        if logs is None or not 0 <= partition.number < len(logs):
            raise DependencyError(
                f"there is no {partition.topic}/{partition.number}: apply the recipe first"
            )
        return logs[partition.number]

    def ends(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset and its last stable offset."""
        logs = [self.log(partition) for partition in partitions]
        return {log.partition: (log.first, log.stable_end) for log in logs}

    async def decided(self, positions: Sequence[Position], limit_s: float) -> None:
        """Waits, bounded, while any of the positions lies in a transaction not yet marked."""
        wake = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for position in positions:
                    log = self.log(position.partition)
                    while log.stable_end <= position.offset < log.end:
                        wake.clear()
                        log.watchers[wake] = None
                        try:
                            await wake.wait()
                        finally:
                            del log.watchers[wake]

    def append(self, outgoing: Outgoing) -> Position:
        """Writes one record."""
        log = self._route(outgoing)
        return Position(log.partition, log.append(outgoing, now()))

    def group(self, name: str) -> Group:
        """A consumer group; made where it is not there yet."""
        return self._groups.setdefault(name, Group(name, self._partitions))

    def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's places; a partition without one is absent."""
        places = self.group(consumer_group).places
        return {partition: places[partition] for partition in partitions if partition in places}

    def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 where the group has no place. DependencyError where it has members."""
        group = self.group(consumer_group)
        absent = [self.log(place).partition for place in partitions if place not in group.places]
        if absent and group.members:
            raise DependencyError(
                f"can't set the first places of {consumer_group}: it has members already"
            )
        group.places |= dict.fromkeys(absent, Committed(0))

    def take_over(self, writer: str) -> int:
        """Cuts off the sole writer of that name; returns the successor's epoch."""
        return self._writers.setdefault(writer, SoleWriter(writer)).take_over()

    def begin(
        self,
        writer: str,
        epoch: int,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed],
        consumer_group: str,
    ) -> list[Position]:
        """Opens a transaction and writes all into it. It counts for nothing yet."""
        check_metadata(commits)
        logs = [self._route(outgoing) for outgoing in records]
        sole = self._writers[writer]
        transaction = Transaction(commits=commits, consumer_group=consumer_group)
        sole.begin(epoch, transaction)
        asyncio.get_running_loop().call_later(TRANSACTION_S, sole.time_out, transaction)
        return [
            Position(log.partition, log.append(outgoing, now(), transaction))
            for log, outgoing in zip(logs, records, strict=True)
        ]

    def commit(self, writer: str, epoch: int) -> None:
        """Makes the writer's open transaction count: records and places at once.

        As on Kafka, it is decided when this returns, and seen by readers a moment later.
        """
        transaction = self._writers[writer].commit(epoch)
        self.group(transaction.consumer_group).places |= transaction.commits
        asyncio.get_running_loop().call_later(MARKING_S, transaction.mark)

    def _route(self, outgoing: Outgoing) -> PartitionLog:
        number = outgoing.partition
        if number is None:
            number = partition_of(outgoing.key, max(1, len(self.topics.get(outgoing.topic, ()))))
        return self.log(Partition(outgoing.topic, number))

    def _partitions(self, topics: Sequence[str]) -> list[Partition]:
        return [log.partition for topic in topics for log in self.topics.get(topic, ())]


class Process:
    """One process's line to the cluster."""

    def __init__(
        self, name: str, session_s: float, latency: Callable[[], float] | None = None
    ) -> None:
        """`latency` draws the seconds that a request, an answer or a fetch takes; None is none."""
        self.name = name
        self._session_s = session_s
        self._latency = latency
        self._gone = ""
        """Why nothing reaches the cluster any more."""
        self._running = asyncio.Event()
        self._running.set()
        self._requests: deque[Callable[[], None]] = deque()
        self._answers: deque[Callable[[], None]] = deque()
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._members: dict[Member, Group] = {}
        self._expulsions: list[asyncio.TimerHandle] = []
        self._wakes: dict[asyncio.Event, None] = {}

    async def call(self, effect: Callable[[], R]) -> R:
        """Has the cluster do something, and returns its answer. It may land though the caller is
        cancelled. DependencyError once the process is gone."""
        self._check()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting[future] = None
        future.add_done_callback(self._waiting.pop)

        def land() -> None:
            try:
                result = effect()
            except HeadraceError as error:
                self._answers.append(lambda error=error: _fail(future, error))  # type: ignore[misc]
            else:
                self._answers.append(lambda: _resolve(future, result))
            self._travel(self._answers)

        self._requests.append(land)
        self._travel(self._requests)
        return await future

    async def turn(self) -> None:
        """Passes a turn of the loop, and all the time that the process is frozen."""
        await asyncio.sleep(0 if self._latency is None else self._latency())
        await self._running.wait()
        self._check()

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Runs what the client library does by itself. Cancelled when the process ends."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(heard)
        return task

    def keep_session(self, group: Group, member: Member) -> None:
        """Sends heartbeats for a member from now on."""
        self._members[member] = group

    def end_session(self, member: Member) -> None:
        """Sends no more heartbeats for it."""
        self._members.pop(member, None)

    def watch(self, wake: asyncio.Event) -> None:
        """Sets the event when the process is gone: what waits for it must hear of that."""
        self._wakes[wake] = None

    def freeze(self) -> None:
        """Stops the process, as SIGSTOP does: nothing is sent, nothing is heard."""
        if self._running.is_set() and not self._gone:
            self._running.clear()
            self._fall_silent()

    def thaw(self) -> None:
        """Lets a frozen process run on, whatever has become of its sessions."""
        if self._gone:  # its sessions run out
            return
        self._running.set()
        for timer in self._expulsions:
            timer.cancel()
        self._expulsions.clear()
        for line in (self._requests, self._answers):
            for _ in range(len(line)):
                self._travel(line)

    def kill(self) -> None:
        """Ends the process without a word. What has not landed never will."""
        self._fall_silent()
        self.end(f"the process {self.name} was killed")

    def end(self, reason: str) -> None:
        """Fails all that still waits for the cluster, and all that comes after."""
        if self._gone:
            return
        self._gone = reason
        self._running.set()
        self._requests.clear()
        self._answers.clear()
        for future in list(self._waiting):
            _fail(future, DependencyError(reason))
        for task in list(self._tasks):
            task.cancel()
        for wake in self._wakes:
            wake.set()

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return bool(self._gone)

    async def flush(self, limit_s: float) -> None:
        """Waits, bounded, for what is under way."""
        if self._waiting:
            await asyncio.wait(list(self._waiting), timeout=limit_s)

    def _check(self) -> None:
        if self._gone:
            raise DependencyError(f"{self._gone}: nothing reaches the log any more")

    def _travel(self, line: deque[Callable[[], None]]) -> None:
        """Has the head of a line arrive later; none overtakes another."""
        loop = asyncio.get_running_loop()
        if self._latency is None:
            loop.call_soon(self._next, line)
        else:
            loop.call_later(self._latency(), self._next, line)

    def _next(self, line: deque[Callable[[], None]]) -> None:
        if line and self._running.is_set():
            line.popleft()()

    def _fall_silent(self) -> None:
        loop = asyncio.get_running_loop()
        for member, group in self._members.items():
            self._expulsions.append(loop.call_later(self._session_s, group.expel, member))


def heard(task: asyncio.Task[Any]) -> None:
    """For a task that may fail though nobody waits for it any more: asyncio need not complain."""
    if not task.cancelled():
        task.exception()


def _resolve(future: asyncio.Future[R], result: R) -> None:
    if not future.done():  # Else its caller was cancelled.
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: HeadraceError) -> None:
    if not future.done():
        future.set_exception(error)
