"""Fetches single records by their positions, for example those that a trainer batch refers to.

The positions are sorted. Each partition is read forward from its first position; the fetcher seeks
over wide gaps. It caches the other records that it reads on the way, bounded, because the next
batch often continues there. For the same reason it keeps a partition that a fetch does not need
for a while: librdkafka forgets what it has read ahead of a partition that is given up.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import inf
from time import monotonic

from confluent_kafka import KafkaError, Message, TopicPartition

from headrace.errors import DependencyError, HeadraceError, RecordsLost
from headrace.services.kafka.broker import Partition, Position, Record, records_lost
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import (
    find_leaders,
    lag_of,
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
AHEAD = 512
"""How many offsets of a partition are read ahead at most. Otherwise one that comes first fills the
cache alone."""
CACHE_BYTES = 32 * 1024 * 1024
READ_AHEAD_S = 0.01
"""How often it looks, while it reads ahead, whether somebody wants a record."""
QUIET_S = 1.0
"""If no record comes for so long, it reads no further ahead, although it did not see the end."""
IDLE_FETCHES = 8
"""After so many fetches that did not need a partition, it is given up."""


class Fetcher:
    """A consumer, and the thread that uses it: fetches run one at a time."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._consumer = make_consumer(settings.fetcher())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-fetches")
        self._next: dict[Partition, int] = {}
        """The next offset of each assigned partition."""
        self._known: set[str] = set()
        """Topics whose leaders were asked for."""
        self._read_to: dict[Partition, int] = {}
        """The same of each partition that was ever read."""
        self._idle: dict[Partition, int] = {}
        """How many fetches in a row did not need each partition. If it is given up, it has none."""
        self._far: set[Partition] = set()
        """Partitions that were unassigned because they were read far enough ahead."""
        self._passed: dict[Partition, float] = {}
        """The highest offset that the last fetch of each partition needed. What is cached before it
        is hardly needed any more."""
        self._forward = False
        """Whether the last fetch read on in at least half of its partitions, not elsewhere."""
        self._asked = 0
        """How many fetches were asked for."""
        self._cache: OrderedDict[Position, Record] = OrderedDict()
        self._cached_bytes = 0
        self._closing = False

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the given order. RecordsLost if one is gone.

        DependencyError if the fetcher is closed meanwhile.
        """
        self._require_open()
        loop = asyncio.get_running_loop()
        self._asked += 1
        fetching = loop.run_in_executor(self._thread, self._fetch, positions)
        self._thread.submit(self._read_ahead, self._asked)
        return await fetching

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
        asked: dict[Partition, float] = {}
        """The highest offset of each partition."""
        for position in sorted(set(positions)):
            asked[position.partition] = position.offset
            if (record := self._cache.pop(position, None)) is not None:
                self._cached_bytes -= weight(record)
                found[position] = record
            else:
                wanted.setdefault(position.partition, deque()).append(position.offset)
        try:
            with as_failure("can't fetch"):
                self._narrow(wanted, asked)
                self._read(wanted, found)
        except HeadraceError:
            self._unassign(list(self._next))  # Their positions are not known after a failure.
            raise
        return [found[position] for position in positions]

    def _read(self, wanted: dict[Partition, deque[int]], found: dict[Position, Record]) -> None:
        """Reads until all wanted records are found."""
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

    def _narrow(self, wanted: dict[Partition, deque[int]], asked: dict[Partition, float]) -> None:
        """Starts partitions that are wanted, and unassigns those that were not asked for long.

        If the cache has all that is asked of a partition, it is read on soon, so it is kept.
        """
        self._passed |= asked
        forward = sum(_is_near(self._read_to.get(at), one[0]) for at, one in wanted.items())
        self._forward = 2 * forward >= len(wanted)
        self._idle = {at: idle + 1 for at, idle in self._idle.items()} | dict.fromkeys(asked, 0)
        kept = IDLE_FETCHES if self._forward else 0
        given_up = [at for at, idle in self._idle.items() if idle > kept]
        self._passed |= dict.fromkeys(given_up, inf)
        self._idle = {at: idle for at, idle in self._idle.items() if idle <= kept}
        self._unassign([at for at in given_up if at in self._next])
        self._far.difference_update(given_up)
        for at in [at for at in self._far if self._ahead(at) < AHEAD // 2]:
            self._start(at, self._read_to[at])
        for partition, offsets in wanted.items():
            self._start(partition, offsets[0])

    def _read_ahead(self, asked: int) -> None:
        """Caches what comes, until it has seen the ends of all partitions.

        If fetches do not go forward, it caches nothing. It ends if more fetches than `asked` are
        asked for.
        """
        came_at = monotonic()
        try:
            with as_failure("can't read ahead"):
                while asked == self._asked and self._has_room():
                    if not self._forward or monotonic() - came_at > QUIET_S:
                        self._unassign(list(self._next))
                    if not self._next:
                        return
                    for message in self._consumer.consume(BATCH, READ_AHEAD_S):
                        self._take(message, {}, {})
                        came_at = monotonic()
        except HeadraceError:  # If it stays, the next fetch raises it.
            self._unassign(list(self._next))

    def _has_room(self) -> bool:
        """Whether half of the cache is free, or all of it has room for the rest of the log.

        If not, it first drops the oldest records, as long as fetches have passed them: of a run
        that filters groups, no batch needs a part of them. librdkafka comes to rest at the end of
        the log, or when it has read so much further that its own queue is full.
        """
        while self._cache and self._cached_bytes >= CACHE_BYTES // 2:
            oldest = next(iter(self._cache))
            if oldest.offset >= self._passed.get(oldest.partition, 0):
                break
            self._drop_oldest()
        if self._cached_bytes < CACHE_BYTES // 2:
            return True
        rest = sum(lag_of(self._consumer, self._next).values())
        return self._cached_bytes * (1 + rest / len(self._cache)) < CACHE_BYTES

    def _drop_oldest(self) -> None:
        _, oldest = self._cache.popitem(last=False)
        self._cached_bytes -= weight(oldest)

    def _ahead(self, partition: Partition) -> float:
        """How many offsets a partition was read ahead of what fetches needed."""
        return self._read_to[partition] - self._passed.get(partition, 0)

    def _unassign(self, partitions: Sequence[Partition]) -> None:
        if not partitions:
            return
        self._consumer.incremental_unassign(topic_partitions(partitions))
        for partition in partitions:
            del self._next[partition]

    def _start(self, partition: Partition, offset: int) -> None:
        """Reads on if the offset is just ahead, or else starts there."""
        self._far.discard(partition)
        if _is_near(self._next.get(partition), offset):
            return
        if partition in self._next:
            self._unassign([partition])
        if _is_near(self._read_to.get(partition), offset):
            offset = self._read_to[partition]
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
            self._on_error(error, message.topic(), message.partition(), wanted)
            return False
        partition, offset = location(message)
        offsets = wanted.get(partition)
        if offsets and offsets[0] < offset:
            raise self._gone(partition, offsets)
        if error is not None and partition in self._next and not offsets:
            # Otherwise librdkafka would ask the broker for more every few milliseconds. A pause
            # would do that, too, but librdkafka may only notice its end up to a second later.
            self._unassign([partition])
        if error is not None or offset < self._next.get(partition, offset + 1):
            return False
        self._next[partition] = self._read_to[partition] = offset + 1
        if not offsets or offsets[0] != offset:
            self._keep(to_record(message))
            if not offsets and self._ahead(partition) >= AHEAD:
                self._unassign([partition])
                self._far.add(partition)
            return bool(offsets)
        found[Position(partition, offset)] = to_record(message)
        offsets.popleft()
        if offsets:
            self._start(partition, offsets[0])
        else:
            del wanted[partition]
        return True

    def _on_error(
        self,
        error: KafkaError,
        topic: str | None,
        number: int | None,
        wanted: dict[Partition, deque[int]],
    ) -> None:
        """Raises an error that ends the fetch, or starts again where it does no harm."""
        partition = Partition(topic or "", -1 if number is None else number)
        offsets = wanted.get(partition)
        if partition in self._next and not offsets:
            self._unassign([partition])
        elif error.code() == KafkaError._AUTO_OFFSET_RESET and offsets:
            if self._next[partition] >= offsets[0]:
                raise self._gone(partition, offsets)
            self._unassign([partition])  # Only records before the wanted one are gone.
            self._read_to.pop(partition, None)
            self._start(partition, offsets[0])
        elif error.fatal() or error.code() in FINAL:
            raise failure(f"can't fetch from {topic}", error)

    def _keep(self, record: Record) -> None:
        """Caches a record that is not wanted yet, and drops the oldest ones for it."""
        position = Position(record.partition, record.offset)
        if (again := self._cache.pop(position, None)) is not None:  # read before, further back
            self._cached_bytes -= weight(again)
        self._cache[position] = record
        self._cached_bytes += weight(record)
        while self._cached_bytes > CACHE_BYTES:
            self._drop_oldest()

    def _gone(self, partition: Partition, offsets: deque[int]) -> RecordsLost:
        return records_lost(partition, offsets[0], watermarks(self._consumer, partition))


def _is_near(following: int | None, offset: int) -> bool:
    """Whether an offset comes so soon that what is before it may be read over."""
    return following is not None and following <= offset <= following + GAP
