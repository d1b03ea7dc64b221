"""The state that the in-memory log's processes share: topics, consumer groups, sole writers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from headrace.errors import DependencyError, UsageError
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Committed, Outgoing, Partition, Position
from headrace.services.kafka.convert import partition_of
from tests.memory.memory_group import MemoryGroup
from tests.memory.memory_log import PartitionLog, SoleWriter, Transaction

TRANSACTION_S = 10.0
"""How long a transaction may be open."""
MARKING_S = 0.001
"""Time from a commit until its markers are written."""


class State:
    """The state of the cluster."""

    def __init__(self) -> None:
        self.topics: dict[str, list[PartitionLog]] = {}
        self.configurations: dict[str, dict[str, str]] = {}
        """The configuration that each topic was created with. It has no effect here."""
        self._groups: dict[str, MemoryGroup] = {}
        self._writers: dict[str, SoleWriter] = {}
        self._down_until = 0.0

    def stop_answering(self, seconds: float) -> None:
        """Makes requests wait for some seconds from now on."""
        self._down_until = max(self._down_until, asyncio.get_running_loop().time() + seconds)

    def down_s(self) -> float:
        """Seconds until the log answers again; 0 if it does now."""
        if not self._down_until:
            return 0.0
        return max(0.0, self._down_until - asyncio.get_running_loop().time())

    def groups(self) -> list[MemoryGroup]:
        """All consumer groups."""
        return list(self._groups.values())

    def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Creates the topics that do not exist: name to (partitions, configuration)."""
        for name, (partitions, configuration) in topics.items():
            logs = [PartitionLog(Partition(name, number)) for number in range(partitions)]
            actual = len(self.topics.setdefault(name, logs))
            self.configurations.setdefault(name, dict(configuration))
            if actual != partitions:
                raise UsageError(
                    f"the topic {name} has {actual} partitions, not {partitions}. Their number is "
                    f"fixed when a namespace is created: use {actual} partitions, or another "
                    "namespace"
                )

    def settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The topics' configurations. Raises DependencyError if one does not exist."""
        for name in topics:
            self.log(Partition(name, 0))
        return {name: dict(self.configurations[name]) for name in topics}

    def delete_topics(self, topics: Sequence[str]) -> None:
        """Deletes topics, and the groups' commits for them."""
        for name in topics:
            self.configurations.pop(name, None)
            for log in self.topics.pop(name, []):
                for group in self._groups.values():
                    group.commits.pop(log.partition, None)
                log.wake()

    def log(self, partition: Partition) -> PartitionLog:
        """A partition's log. Raises DependencyError if there is no such partition."""
        logs = self.topics.get(partition.topic)
        if logs is None or not 0 <= partition.number < len(logs):
            raise DependencyError(
                f"{partition.topic}/{partition.number} does not exist: apply the recipe first"
            )
        return logs[partition.number]

    def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset and its end; `include_uncommitted` as in `Broker`."""
        logs = [self.log(partition) for partition in partitions]
        return {
            log.partition: (log.first, log.end if include_uncommitted else log.stable_end)
            for log in logs
        }

    async def decided(self, positions: Sequence[Position], limit_s: float) -> None:
        """Waits, bounded, while any of the positions is in a transaction not yet marked."""
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
        log = self.route(outgoing)
        return Position(log.partition, log.append(outgoing, now()))

    def group(self, name: str) -> MemoryGroup:
        """A consumer group. Creates it if it does not exist."""
        return self._groups.setdefault(name, MemoryGroup(name, self._partitions))

    def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's commits. A partition without one is absent."""
        commits = self.group(consumer_group).commits
        return {at: commits[at] for at in partitions if at in commits}

    def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 for partitions without a commit.

        Raises DependencyError if the group has members.
        """
        group = self.group(consumer_group)
        absent = [self.log(at).partition for at in partitions if at not in group.commits]
        if absent and group.members:
            raise DependencyError(
                f"can't make the first commits of {consumer_group}: it has members already"
            )
        group.commits |= dict.fromkeys(absent, Committed(0))

    def fence(self, writer: str) -> int:
        """Fences the sole writer of that name; returns the successor's epoch."""
        return self._writers.setdefault(writer, SoleWriter(writer)).fence()

    def begin(self, writer: str, epoch: int, records: Sequence[Outgoing]) -> list[Position]:
        """Opens a transaction and writes all records into it."""
        logs = [self.route(outgoing) for outgoing in records]
        sole = self._writers[writer]
        transaction = Transaction()
        sole.begin(epoch, transaction)
        asyncio.get_running_loop().call_later(TRANSACTION_S, sole.time_out, transaction)
        return [
            Position(log.partition, log.append(outgoing, now(), transaction))
            for log, outgoing in zip(logs, records, strict=True)
        ]

    def commit(self, writer: str, epoch: int) -> None:
        """Commits the writer's open transaction.

        As on Kafka, it is decided when this returns, and readers see it a moment later.
        """
        transaction = self._writers[writer].commit(epoch)
        asyncio.get_running_loop().call_later(MARKING_S, transaction.mark)

    def abort(self, writer: str, epoch: int) -> None:
        """Aborts the writer's open transaction. Raises Fenced if it has a successor."""
        self._writers[writer].abort(epoch)

    def route(self, outgoing: Outgoing) -> PartitionLog:
        """The partition that a record goes to."""
        number = outgoing.partition
        if number is None:
            number = partition_of(outgoing.key, max(1, len(self.topics.get(outgoing.topic, ()))))
        return self.log(Partition(outgoing.topic, number))

    def _partitions(self, topics: Sequence[str]) -> list[Partition]:
        return [log.partition for topic in topics for log in self.topics.get(topic, ())]
