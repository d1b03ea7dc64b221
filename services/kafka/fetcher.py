"""Single records by their places: what a trainer batch refers to.

The places are sorted, and each partition is read forward from its first one; a wide gap is
skipped by a new start. What comes along is cached, bounded: the next batch often continues there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from headrace.errors import DependencyError, HeadraceError, RecordsLost
from headrace.services.kafka.broker import Partition, Position, Record
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import (
    make_consumer,
    to_record,
    topic_partitions,
    watermarks,
)
from headrace.services.kafka.failures import FINAL, error_of, failure
from headrace.services.kafka.lost import records_lost

SILENCE_S = 10.0
"""No record for so long, while some are wanted: the broker is out of reach."""
POLL_S = 0.1
BATCH = 500
GAP = 256
"""Offsets worth reading past, rather than starting anew beyond them."""
CACHE_BYTES = 32 * 1024 * 1024


class Fetcher:
    """A consumer, used by one thread at a time: the broker object's `fetch` thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._consumer = make_consumer(settings.fetcher())
        self._next: dict[Partition, int] = {}
        """The assigned partitions, each with the offset that comes next."""
        self._cache: OrderedDict[Position, Record] = OrderedDict()
        self._cached_bytes = 0

    def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the order asked. RecordsLost if one is gone."""
        found: dict[Position, Record] = {}
        wanted: dict[Partition, deque[int]] = {}
        for position in sorted(set(positions), key=lambda at: (at.partition, at.offset)):
            if (record := self._cache.pop(position, None)) is not None:
                self._cached_bytes -= len(record.value or b"")
                found[position] = record
            else:
                wanted.setdefault(position.partition, deque()).append(position.offset)
        try:
            self._read(wanted, found)
        except KafkaException as exception:
            self._begin_anew()
            raise failure("can't fetch", error_of(exception)) from exception
        except HeadraceError:
            self._begin_anew()
            raise
        return [found[position] for position in positions]

    def close(self) -> None:
        """Ends the consumer."""
        self._consumer.close()

    def _read(self, wanted: dict[Partition, deque[int]], found: dict[Position, Record]) -> None:
        """Reads until nothing is wanted any more."""
        self._narrow(wanted)
        heard = monotonic()
        while wanted:
            messages = self._consumer.consume(1, POLL_S)
            messages += self._consumer.consume(BATCH, 0)
            for message in messages:
                if self._take(message, wanted, found):
                    heard = monotonic()
            if monotonic() - heard > SILENCE_S:
                place, offsets = next(iter(wanted.items()))
                raise DependencyError(
                    f"{place.topic}/{place.number}@{offsets[0]} did not come within "
                    f"{SILENCE_S:.0f} s: is Kafka running, and was the record ever written?"
                )

    def _begin_anew(self) -> None:
        """Forgets what is assigned: after a failure it says nothing about where reading goes on."""
        self._consumer.unassign()
        self._next.clear()

    def _narrow(self, wanted: dict[Partition, deque[int]]) -> None:
        """Keeps the partitions that are wanted, each started where it is."""
        idle = self._next.keys() - wanted.keys()
        if idle:
            self._consumer.incremental_unassign(topic_partitions(idle))
            for place in idle:
                del self._next[place]
        for place, offsets in wanted.items():
            self._start(place, offsets[0])

    def _start(self, place: Partition, offset: int) -> None:
        """Reads on if the offset is just ahead, else from there."""
        following = self._next.get(place)
        if following is not None and following <= offset <= following + GAP:
            return
        if following is not None:
            self._consumer.incremental_unassign(topic_partitions([place]))
        self._consumer.incremental_assign([TopicPartition(place.topic, place.number, offset)])
        self._next[place] = offset

    def _take(
        self,
        message: Message,
        wanted: dict[Partition, deque[int]],
        found: dict[Position, Record],
    ) -> bool:
        """Takes a message in. True where it brought the fetching forward."""
        error = message.error()
        topic, number, offset = message.topic(), message.partition(), message.offset()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.code() == KafkaError._AUTO_OFFSET_RESET and topic and number is not None:
                place = Partition(topic, number)
                raise self._gone(place, wanted.get(place))
            if error.fatal() or error.code() in FINAL:
                raise failure(f"can't fetch from {topic}", error)
            return False
        assert topic is not None
        assert number is not None
        assert offset is not None
        place = Partition(topic, number)
        offsets = wanted.get(place)
        if offsets and offsets[0] < offset:
            raise self._gone(place, offsets)
        if error is not None or offset < self._next.get(place, 0):
            return False
        self._next[place] = offset + 1
        if not offsets or offsets[0] != offset:
            self._keep(to_record(message, place, offset))
            return bool(offsets)
        found[Position(place, offset)] = to_record(message, place, offset)
        offsets.popleft()
        if offsets:
            self._start(place, offsets[0])
        else:
            del wanted[place]
        return True

    def _keep(self, record: Record) -> None:
        """Caches what nobody asked for yet; the oldest makes room."""
        self._cache[Position(record.partition, record.offset)] = record
        self._cached_bytes += len(record.value or b"")
        while self._cached_bytes > CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= len(oldest.value or b"")

    def _gone(self, place: Partition, offsets: deque[int] | None) -> RecordsLost:
        return records_lost(
            place, offsets[0] if offsets else None, watermarks(self._consumer, place)
        )
