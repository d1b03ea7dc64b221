"""Fetches single records by their positions, for example those that a trainer batch refers to.

The positions are sorted. Each partition is read forward from its first position; the fetcher seeks
over wide gaps. It caches the other records that it reads on the way, bounded, because the next
batch often continues there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from confluent_kafka import KafkaError, Message, TopicPartition

from headrace.errors import DependencyError, HeadraceError, RecordsLost
from headrace.services.kafka.broker import Partition, Position, Record, records_lost
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import (
    find_leaders,
    location,
    make_consumer,
    to_record,
    topic_partitions,
    watermarks,
    weight,
)
from headrace.services.kafka.failures import FINAL, as_failure, failure

SILENCE_S = 10.0
"""If no wanted record comes for this long, the fetch fails. Only then is a record behind the end of
the log lost: a new leader may know the end a moment late."""
POLL_S = 0.1
BATCH = 500
GAP = 256
"""The widest gap, in offsets, that is read over instead of skipped."""
CACHE_BYTES = 32 * 1024 * 1024


class Fetcher:
    """A consumer, and the thread that uses it: fetches run one at a time."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._consumer = make_consumer(settings.fetcher())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-fetches")
        self._next: dict[Partition, int] = {}
        """The next offset of each assigned partition."""
        self._known: set[str] = set()
        """Topics whose leaders were asked for."""
        self._cache: OrderedDict[Position, Record] = OrderedDict()
        self._cached_bytes = 0
        self._closing = False

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the given order. RecordsLost if one is gone.

        DependencyError if the fetcher is closed meanwhile.
        """
        self._require_open()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._fetch, positions)

    async def close(self) -> None:
        """Ends the running fetch and those that wait, and closes the consumer."""
        if self._closing:
            return
        self._closing = True
        self._thread.submit(self._consumer.close)
        await asyncio.to_thread(self._thread.shutdown)

    def _fetch(self, positions: Sequence[Position]) -> list[Record]:
        found: dict[Position, Record] = {}
        wanted: dict[Partition, deque[int]] = {}
        for position in sorted(set(positions), key=lambda at: (at.partition, at.offset)):
            if (record := self._cache.pop(position, None)) is not None:
                self._cached_bytes -= weight(record)
                found[position] = record
            else:
                wanted.setdefault(position.partition, deque()).append(position.offset)
        try:
            with as_failure("can't fetch"):
                self._read(wanted, found)
        except HeadraceError:
            self._consumer.unassign()
            self._next.clear()  # They are not known after a failure.
            raise
        return [found[position] for position in positions]

    def _read(self, wanted: dict[Partition, deque[int]], found: dict[Position, Record]) -> None:
        """Reads until all wanted records are found."""
        self._narrow(wanted)
        progress_at = monotonic()
        while wanted:
            self._require_open()
            messages = self._consumer.consume(1, POLL_S)
            messages += self._consumer.consume(BATCH, 0)
            for message in messages:
                if self._take(message, wanted, found):
                    progress_at = monotonic()
            if monotonic() - progress_at > SILENCE_S:
                partition, offsets = next(iter(wanted.items()))
                bounds = watermarks(self._consumer, partition)
                if bounds is not None and offsets[0] >= bounds[1]:
                    raise self._gone(partition, offsets)
                raise DependencyError(
                    f"{partition.topic}/{partition.number}@{offsets[0]} did not come within "
                    f"{SILENCE_S:.0f} s. Is Kafka running, and was the record ever written?"
                )

    def _require_open(self) -> None:
        if self._closing:
            raise DependencyError("can't fetch: this broker object is closed")

    def _narrow(self, wanted: dict[Partition, deque[int]]) -> None:
        """Unassigns partitions that are not wanted, and starts those that are."""
        idle = self._next.keys() - wanted.keys()
        if idle:
            self._consumer.incremental_unassign(topic_partitions(idle))
            for partition in idle:
                del self._next[partition]
        for partition, offsets in wanted.items():
            self._start(partition, offsets[0])

    def _start(self, partition: Partition, offset: int) -> None:
        """Reads on if the offset is just ahead, or else starts there."""
        following = self._next.get(partition)
        if following is not None and following <= offset <= following + GAP:
            return
        if following is not None:
            self._consumer.incremental_unassign(topic_partitions([partition]))
        self._consumer.incremental_assign(
            [TopicPartition(partition.topic, partition.number, offset)]
        )
        if partition.topic not in self._known:
            self._known.add(partition.topic)
            find_leaders(self._consumer, {partition.topic})
        self._next[partition] = offset

    def _take(
        self,
        message: Message,
        wanted: dict[Partition, deque[int]],
        found: dict[Position, Record],
    ) -> bool:
        """Handles a message. True if it made progress towards the wanted records."""
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            topic, number = message.topic(), message.partition()
            if error.code() == KafkaError._AUTO_OFFSET_RESET and topic and number is not None:
                partition = Partition(topic, number)
                raise self._gone(partition, wanted.get(partition))
            if error.fatal() or error.code() in FINAL:
                raise failure(f"can't fetch from {topic}", error)
            return False
        partition, offset = location(message)
        offsets = wanted.get(partition)
        if offsets and offsets[0] < offset:
            raise self._gone(partition, offsets)
        if error is not None or offset < self._next.get(partition, 0):
            return False
        self._next[partition] = offset + 1
        if not offsets or offsets[0] != offset:
            self._keep(to_record(message))
            return bool(offsets)
        found[Position(partition, offset)] = to_record(message)
        offsets.popleft()
        if offsets:
            self._start(partition, offsets[0])
        else:
            del wanted[partition]
        return True

    def _keep(self, record: Record) -> None:
        """Caches a record that is not wanted yet, and drops the oldest ones for it."""
        position = Position(record.partition, record.offset)
        if (again := self._cache.pop(position, None)) is not None:  # read before, further back
            self._cached_bytes -= weight(again)
        self._cache[position] = record
        self._cached_bytes += weight(record)
        while self._cached_bytes > CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= weight(oldest)

    def _gone(self, partition: Partition, offsets: deque[int] | None) -> RecordsLost:
        return records_lost(
            partition, offsets[0] if offsets else None, watermarks(self._consumer, partition)
        )
