"""Converts between librdkafka's objects and Headrace's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import methodcaller

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
    murmur2,
)

from headrace.services.kafka.broker import Committed, Headers, Outgoing, Partition, Record
from headrace.services.kafka.client_settings import Properties, logger
from headrace.services.kafka.failures import as_failure

WATERMARKS_S = 2.0
LEADERS_S = 1.0
MAX_HEADERS = 1_000
"""A record with more headers is read without its headers: millions fit into one record."""
RECORD_WEIGHT = 1_024
"""Bytes that a record counts for in addition to its content."""
HEADER_WEIGHT = 100
"""Bytes that a header counts for in addition to its value."""


def make_consumer(
    properties: Properties, on_error: Callable[[KafkaError], None] | None = None
) -> Consumer:
    """A consumer that logs to Headrace's log. Raises UsageError if a property is invalid.

    `on_error` gets what went wrong with connections, while the consumer polls.
    """
    noting = {} if on_error is None else {"error_cb": on_error}
    with as_failure("can't create a Kafka consumer"):
        return Consumer({**properties, **noting}, logger=logger)


def make_producer(properties: Properties) -> Producer:
    """A producer that logs to Headrace's log. Raises UsageError if a property is invalid."""
    with as_failure("can't create a Kafka producer"):
        return Producer(dict(properties), logger=logger)


def partition_of(key: bytes, partitions: int) -> int:
    """The number of the key's partition in a topic with `partitions` partitions.

    Java's clients, aiokafka, and librdkafka's partitioner `murmur2_random` give the same result, so
    all clients agree on the partition of a task's events.
    """
    return murmur2(key, partitions)


def produce(
    producer: Producer, record: Outgoing, on_delivery: Callable[[KafkaError | None, Message], None]
) -> None:
    """Gives a record to librdkafka. Raises BufferError if its queue is full."""
    producer.produce(
        record.topic,
        record.value,
        record.key,
        -1 if record.partition is None else record.partition,
        on_delivery=on_delivery,
        headers=list(record.headers),
    )


def to_record(message: Message) -> Record:
    """A message as a record. Headers that can't be read are left out, all of them."""
    partition, offset = location(message)
    timestamp = message.timestamp()[1] / 1_000
    return Record(partition, offset, timestamp, message.key(), message.value(), _headers(message))


_read_headers = methodcaller("headers")
"""Calls `Message.headers`. If a name is not UTF-8, confluent-kafka 2.16 returns a list with null
pointers and sets an error. Only a call that is not made by bytecode surely checks for that: the
specialized bytecode of Python 3.11 does not, and whoever reads such a list crashes the process."""


def _headers(message: Message) -> Headers:
    """Any program may write headers without a value, and names that are not UTF-8."""
    given: list[tuple[str, bytes | None]]
    try:
        given = _read_headers(message) or []
    except (SystemError, UnicodeDecodeError):
        # Don't ask again: it would return the broken list without an error.
        return []
    if len(given) > MAX_HEADERS:
        return []
    return [(name, value or b"") for name, value in given]


def weight(record: Record) -> int:
    """About how many bytes a record takes in memory."""
    headers = HEADER_WEIGHT * len(record.headers) + sum([len(one) for _, one in record.headers])
    return RECORD_WEIGHT + len(record.key or b"") + len(record.value or b"") + headers


def location(message: Message) -> tuple[Partition, int]:
    """The partition and offset of a message that was delivered or read, or of a partition's end."""
    topic, number, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert number is not None
    assert offset is not None
    return _partition(topic, number), offset


@lru_cache(maxsize=4_096)
def _partition(topic: str, number: int) -> Partition:
    return Partition(topic, number)


def topic_partitions(
    partitions: Iterable[Partition], offset: int = OFFSET_INVALID
) -> list[TopicPartition]:
    """Partitions as librdkafka's, each with this offset."""
    return [TopicPartition(at.topic, at.number, offset) for at in partitions]


def offsets_of(commits: Mapping[Partition, Committed]) -> list[TopicPartition]:
    """Commits as librdkafka's."""
    return [
        TopicPartition(partition.topic, partition.number, committed.offset, committed.metadata)
        for partition, committed in commits.items()
    ]


def committed_in(answer: Sequence[TopicPartition]) -> dict[Partition, Committed]:
    """The commits in a coordinator's answer. Partitions without one are left out."""
    return {
        Partition(one.topic, one.partition): Committed(one.offset, one.metadata or "")
        for one in answer
        if one.offset >= 0
    }


def find_leaders(consumer: Consumer, topics: set[str]) -> None:
    """Asks for the leaders of topics that a consumer begins to read, and empties `topics`.

    librdkafka looks only once a second for those of topics that are new to it. If no broker answers
    in time, it goes on to do so. Must not be called in a callback of the consumer: confluent-kafka
    forgets the call that the callback belongs to, and may abort the process.
    """
    try:
        while topics:
            consumer.list_topics(topics.pop(), timeout=LEADERS_S)
    except KafkaException:
        topics.clear()


def checked(answer: list[TopicPartition]) -> list[TopicPartition]:
    """Returns an answer. Raises KafkaException if one of its partitions has an error."""
    for one in answer:
        if one.error is not None:
            raise KafkaException(one.error)
    return answer


def watermarks(consumer: Consumer, partition: Partition) -> tuple[int, int] | None:
    """A partition's first offset and end, or None if no broker answers in time."""
    try:
        asked = TopicPartition(partition.topic, partition.number)
        return consumer.get_watermark_offsets(asked, timeout=WATERMARKS_S)
    except KafkaException:
        return None


def lag_of(consumer: Consumer, reached: Mapping[Partition, int]) -> dict[str, int]:
    """How many offsets of each topic lie behind those that were reached. Asks no broker.

    The ends are those in the last answers to fetches.
    """
    lag: dict[str, int] = {}
    for at, offset in reached.items():
        asked = TopicPartition(at.topic, at.number)
        _, end = consumer.get_watermark_offsets(asked, cached=True) or (-1, -1)
        lag[at.topic] = lag.get(at.topic, 0) + max(0, int(end) - offset)
    return lag
