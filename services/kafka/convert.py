"""Converts between librdkafka's objects and Headrace's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from headrace.services.kafka.broker import Committed, Partition, Position, Record
from headrace.services.kafka.client_settings import Properties, logger
from headrace.services.kafka.failures import error_of, failure

WATERMARKS_S = 2.0


def make_consumer(properties: Properties) -> Consumer:
    """A consumer that logs to Headrace's log. Raises UsageError if a property is invalid."""
    try:
        return Consumer(dict(properties), logger=logger)
    except KafkaException as exception:
        raise failure("can't create a Kafka consumer", error_of(exception)) from exception


def make_producer(properties: Properties) -> Producer:
    """A producer that logs to Headrace's log. Raises UsageError if a property is invalid."""
    try:
        return Producer(dict(properties), logger=logger)
    except KafkaException as exception:
        raise failure("can't create a Kafka producer", error_of(exception)) from exception


def to_record(message: Message, partition: Partition, offset: int) -> Record:
    """A message as a record."""
    headers: list[tuple[str, bytes]] = message.headers() or []  # type: ignore[assignment]
    timestamp = message.timestamp()[1] / 1_000
    return Record(partition, offset, timestamp, message.key(), message.value(), headers)


def to_position(message: Message) -> Position:
    """The position of a delivered message."""
    topic, number, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert number is not None
    assert offset is not None
    return Position(Partition(topic, number), offset)


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
