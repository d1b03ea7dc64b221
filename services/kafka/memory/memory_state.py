"""All that the in-memory log's processes share: topics, consumer groups, sole writers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from headrace.errors import DependencyError, UsageError
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Committed, Outgoing, Partition, Position
from headrace.services.kafka.memory.memory_group import MemoryGroup, check_metadata
from headrace.services.kafka.memory.memory_log import PartitionLog, SoleWriter, Transaction
from headrace.services.kafka.murmur2 import partition_of

TRANSACTION_S = 10.0
"""Seconds that a transaction may be open."""
MARKING_S = 0.001
"""Seconds from a commit until its markers are written."""


class State:
    """The cluster."""

    def __init__(self) -> None:
        self.topics: dict[str, list[PartitionLog]] = {}
        self.configurations: dict[str, dict[str, str]] = {}
        """What each topic was made with; nothing here heeds it."""
        self._groups: dict[str, MemoryGroup] = {}
        self._writers: dict[str, SoleWriter] = {}
        self._back_at = 0.0

    def go_away(self, seconds: float) -> None:
        """Answers nobody for so long, from now on; what comes meanwhile waits."""
        self._back_at = max(self._back_at, asyncio.get_running_loop().time() + seconds)

    def away_s(self) -> float:
        """Seconds until it answers again; 0 where it does."""
        if not self._back_at:
            return 0.0
        return max(0.0, self._back_at - asyncio.get_running_loop().time())

    def groups(self) -> list[MemoryGroup]:
        """All consumer groups."""
        return list(self._groups.values())

    def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Makes the topics that are absent: name to number of partitions and configuration."""
        for name, (partitions, configuration) in topics.items():
            logs = [PartitionLog(Partition(name, number)) for number in range(partitions)]
            there = len(self.topics.setdefault(name, logs))
            self.configurations.setdefault(name, dict(configuration))
            if there != partitions:
                raise UsageError(
                    f"the topic {name} has {there} partitions, not {partitions}: their number is "
                    f"fixed when a namespace is made. Use it, or another namespace"
                )

    def settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The topics' configurations. DependencyError where one does not exist."""
        for name in topics:
            self.log(Partition(name, 0))
        return {name: dict(self.configurations[name]) for name in topics}

    def delete_topics(self, topics: Sequence[str]) -> None:
        """Removes topics, and the groups' places in them."""
        for name in topics:
            self.configurations.pop(name, None)
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

    def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset and its last stable offset, or its last of all."""
        logs = [self.log(partition) for partition in partitions]
        return {
            log.partition: (log.first, log.end if include_uncommitted else log.stable_end)
            for log in logs
        }

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
        log = self.route(outgoing)
        return Position(log.partition, log.append(outgoing, now()))

    def group(self, name: str) -> MemoryGroup:
        """A consumer group; made where it is not there yet."""
        return self._groups.setdefault(name, MemoryGroup(name, self._partitions))

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
        logs = [self.route(outgoing) for outgoing in records]
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

    def abort(self, writer: str, epoch: int) -> None:
        """Takes the writer's open transaction back. Fenced where another has taken over."""
        self._writers[writer].abort(epoch)

    def route(self, outgoing: Outgoing) -> PartitionLog:
        """The partition that a record goes to."""
        number = outgoing.partition
        if number is None:
            number = partition_of(outgoing.key, max(1, len(self.topics.get(outgoing.topic, ()))))
        return self.log(Partition(outgoing.topic, number))

    def _partitions(self, topics: Sequence[str]) -> list[Partition]:
        return [log.partition for topic in topics for log in self.topics.get(topic, ())]
