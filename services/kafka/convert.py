"""librdkafka's objects and ours, one from the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from headrace.services.kafka.broker import Committed, Partition, Position, Record
from headrace.services.kafka.client_settings import Properties, logger
from headrace.services.kafka.failures import error_of, failure

WATERMARKS_S = 2.0


def make_consumer(properties: Properties) -> Consumer:
    """A consumer whose words go to our log. UsageError where a property is none."""
    try:
        return Consumer(dict(properties), logger=logger)
    except KafkaException as exception:
        raise failure("can't make a Kafka consumer", error_of(exception)) from exception


def make_producer(properties: Properties) -> Producer:
    """A producer whose words go to our log. UsageError where a property is none."""
    try:
        return Producer(dict(properties), logger=logger)
    except KafkaException as exception:
        raise failure("can't make a Kafka producer", error_of(exception)) from exception


def to_record(message: Message, place: Partition, offset: int) -> Record:
    """A message as a record."""
    headers: list[tuple[str, bytes]] = message.headers() or []  # type: ignore[assignment]
    timestamp = message.timestamp()[1] / 1_000
    return Record(place, offset, timestamp, message.key(), message.value(), headers)


def to_position(message: Message) -> Position:
    """Where a delivered message lies."""
    topic, number, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert number is not None
    assert offset is not None
    return Position(Partition(topic, number), offset)


def topic_partitions(partitions: Iterable[Partition]) -> list[TopicPartition]:
    """Partitions as librdkafka takes them."""
    return [TopicPartition(place.topic, place.number) for place in partitions]


def offsets_of(commits: Mapping[Partition, Committed]) -> list[TopicPartition]:
    """A group's places as librdkafka takes them."""
    return [
        TopicPartition(place.topic, place.number, committed.offset, committed.metadata)
        for place, committed in commits.items()
    ]


def committed_in(places: Sequence[TopicPartition]) -> dict[Partition, Committed]:
    """The places in a coordinator's answer, those without one left out."""
    return {
        Partition(place.topic, place.partition): Committed(place.offset, place.metadata or "")
        for place in places
        if place.offset >= 0
    }


def checked(places: list[TopicPartition]) -> list[TopicPartition]:
    """The same; KafkaException where one bears an error."""
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places


def watermarks(consumer: Consumer, place: Partition) -> tuple[int, int] | None:
    """A partition's first offset and end; None where nobody answers in time."""
    try:
        asked = TopicPartition(place.topic, place.number)
        return consumer.get_watermark_offsets(asked, timeout=WATERMARKS_S)
    except KafkaException:
        return None
