"""The log of one namespace, typed: events in, events out. Below it are bytes, above it are facts.

Every record carries CloudEvents headers (binary mode) and a W3C `traceparent`, which passes from
the event that is being handled to the events that it causes. What is no event goes to
`dead-letters` whole, with Kafka Connect's headers saying where it lay and why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from prometheus_client import Counter

from headrace.errors import DecodeError, RecordsLost
from headrace.schemas.codec import Codec, UnknownSchema
from headrace.schemas.events import EVENTS, Event, Ref
from headrace.schemas.topics import DEAD_LETTERS, Topic, Topics, topic_of
from headrace.services.kafka.broker import (
    Broker,
    FencedWriter,
    Headers,
    Outgoing,
    Partition,
    Position,
    Record,
)
from headrace.services.log.trace import next_traceparent

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event, covariant=True)


WHY = "__connect.errors."
"""Prefix of the headers that say why a record was parked, and where it lay: Kafka Connect's."""

SENT = Counter("headrace_events_sent_total", "Events sent and durable.", ["event"])
DEAD = Counter("headrace_dead_letters_total", "Records that were no event.", ["topic"])


@dataclass(frozen=True, slots=True)
class Delivery(Generic[E]):
    """One event as read."""

    event: E
    ref: Ref
    """Opaque: carried, never computed with."""
    recorded_at: float
    """Seconds since the epoch, by the log's clock."""
    partition: Partition
    offset: int
    traceparent: str = ""


class SchemaSource(Protocol):
    """Where unknown writer's schemas are looked up: the registry."""

    def schema(self, schema_id: int) -> str | None:
        """The Avro schema's text; None where no such id exists. Blocks."""


class EventLog:
    """Typed events in and out of one namespace's topics."""

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        codec: Codec,
        registry: SchemaSource,
        source: str,
        *,
        read_only: bool = False,
    ) -> None:
        """`source` is the worker's id: the CloudEvents source of all that it writes.

        With `read_only` what is no event is passed over with a warning: who only looks at a
        namespace leaves no trace in it.
        """
        self.broker = broker
        self.topics = topics
        self.source = source
        self._read_only = read_only
        self._codec = codec
        self._registry = registry
        self._sent = {event: SENT.labels(event.__name__) for event in EVENTS}
        self._constant: Headers = [
            ("ce_specversion", b"1.0"),
            ("ce_source", source.encode()),
            ("content-type", b"application/avro"),
        ]

    async def send(self, event: Event) -> Ref:
        """Writes an event to its topic. Durable when it returns."""
        record = self.outgoing(event)
        position = await self.broker.send(record)
        self._sent[type(event)].inc()
        return _ref(position, record.value)

    async def send_all(self, writer: FencedWriter, events: Sequence[Event]) -> list[Ref]:
        """Writes all events or none, as the sole writer. Fenced where another has taken over."""
        records = [self.outgoing(event) for event in events]
        positions = await writer.write(records)
        for event in events:
            self._sent[type(event)].inc()
        return [
            _ref(position, record.value)
            for position, record in zip(positions, records, strict=True)
        ]

    def outgoing(self, event: Event) -> Outgoing:
        """The record of an event: topic, key, value, headers."""
        headers = [
            *self._constant,
            ("ce_id", event.event_id.encode()),
            ("ce_type", f"headrace.{type(event).__name__}".encode()),
            ("traceparent", next_traceparent().encode()),
        ]
        value = self._codec.encode(event)
        return Outgoing(self.topics.route(event).name, event.key, value, headers)

    async def decode(self, record: Record) -> Delivery[Event]:
        """The event in a record of this namespace. DecodeError where there is none."""
        event = await self._event(self._topic(record), record)
        assert record.value is not None
        trace = next((text for name, text in record.headers if name == "traceparent"), b"")
        return Delivery(
            event,
            _ref(Position(record.partition, record.offset), record.value),
            record.timestamp,
            record.partition,
            record.offset,
            trace.decode("ascii", "replace"),
        )

    async def _event(self, topic: Topic[Event], record: Record) -> Event:
        if topic.event is None:
            raise DecodeError(f"{record.partition.topic} holds no events", record.value)
        try:
            return self._codec.decode(topic.event, record.value)
        except UnknownSchema as unknown:
            schema = await asyncio.to_thread(self._registry.schema, unknown.schema_id)
            if schema is None:
                raise
            self._codec.add_schema(unknown.schema_id, schema)
            return self._codec.decode(topic.event, record.value)

    async def decode_or_dead_letter(self, record: Record) -> Delivery[Event] | None:
        """As `decode`; what is no event is parked whole in `dead-letters`, and None returned."""
        try:
            return await self.decode(record)
        except DecodeError as error:
            await self.dead_letter(record, error.reason)
            return None

    async def dead_letter(self, record: Record, reason: str) -> None:
        """Parks a record: its key, value and headers as they are, and why. Not if `read_only`."""
        logger.warning(
            "dead letter: %s/%d@%d: %s",
            record.partition.topic,
            record.partition.number,
            record.offset,
            reason,
        )
        if self._read_only:
            return
        DEAD.labels(record.partition.topic).inc()
        cluster = {
            "topic": record.partition.topic,
            "partition": str(record.partition.number),
            "offset": str(record.offset),
            "connector.name": self.source,
            "stage": "VALUE_CONVERTER",
            "exception.message": reason,
        }
        headers = [(f"{WHY}{name}", text.encode()) for name, text in cluster.items()]
        name = self.topics.name(DEAD_LETTERS)
        await self.broker.send(
            Outgoing(name, record.key or b"", record.value or b"", [*record.headers, *headers])
        )

    async def fetch(self, refs: Sequence[Ref]) -> list[Event]:
        """The events that references name, in the order asked. They may lie in other namespaces.

        RecordsLost where one is gone, never was, or is no longer the record that was referred to;
        DecodeError where its topic is none of ours.
        """
        await self._require_places(refs)
        places = [Position(Partition(ref.topic, ref.partition), ref.offset) for ref in refs]
        events = []
        for ref, record in zip(refs, await self.broker.fetch(places), strict=True):
            if _digest(record.value or b"") != ref.digest:
                raise RecordsLost(
                    f"{ref.topic}/{ref.partition}@{ref.offset} is not the record that was "
                    f"referred to: its digest differs. Was the topic made anew?"
                )
            events.append(await self._event(topic_of(ref.topic), record))
        return events

    async def _require_places(self, refs: Sequence[Ref]) -> None:
        """Anybody may write a reference: one that leads nowhere must not look like a broker that
        doesn't answer."""
        there = {placed.name: placed.partitions for placed in self.topics}
        if foreign := {ref.topic for ref in refs} - there.keys():
            for name in foreign:
                try:
                    topic_of(name)
                except KeyError:
                    raise DecodeError(f"a reference names {name}: no topic of ours", None) from None
            there = await self.broker.list_topics() | there
        for ref in refs:
            if ref.partition >= there.get(ref.topic, 0):
                raise RecordsLost(
                    f"{ref.topic}/{ref.partition}@{ref.offset} was never written, or its topic "
                    f"is gone: there is no such partition"
                )

    def _topic(self, record: Record) -> Topic[Event]:
        try:
            return self.topics.by_name(record.partition.topic).topic
        except KeyError:
            raise DecodeError(
                f"{record.partition.topic} is no topic of {self.topics.namespace}", record.value
            ) from None


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:16]


def _ref(position: Position, value: bytes) -> Ref:
    return Ref(
        topic=position.partition.topic,
        partition=position.partition.number,
        offset=position.offset,
        digest=_digest(value),
    )
