"""The typed log of one namespace: events in, events out. The broker below it handles bytes.

Every record carries CloudEvents headers (binary mode) and a W3C `traceparent`, which passes from
the event that is being handled to the events that it causes. A record that is no event goes to
`dead-letters` whole, with Kafka Connect's headers for its origin and the reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from prometheus_client import Counter

from headrace.errors import DecodeError, HeadraceError, RecordsLost, UnknownSchema
from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS, CallEvent, Event, Ref, RunStateEntered
from headrace.schemas.topics import DEAD_LETTERS, Topic, Topics
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.base.redactor import REDACTOR
from headrace.services.kafka.broker import (
    Broker,
    FencedWriter,
    Headers,
    Outgoing,
    Partition,
    Position,
    Record,
)
from headrace.services.kafka.schema_registry import SchemaRegistry
from headrace.services.log.dead_letter import dead_letter_of
from headrace.services.log.references import (
    check_partition,
    check_trajectories,
    readable_topic,
)
from headrace.services.log.request_signatures import (
    REQUESTS,
    RequestSignature,
    RequestSigner,
    SignedLimits,
)
from headrace.services.log.signatures import PublicationSigner, SignedPublications
from headrace.services.log.trace import next_traceparent

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event, covariant=True)


FETCHED_AT_ONCE = 64
"""References whose records `fetch_each` holds in memory at once."""

SENT = Counter("headrace_events_sent_total", "Events sent and durable.", ["event"])
DEAD = Counter("headrace_dead_letters_total", "Records that were no event.", ["topic"])


@dataclass(frozen=True, slots=True)
class Delivery(Generic[E]):
    """One event as read."""

    event: E
    ref: Ref
    """Names the record. Copy it, but compute nothing from it."""
    recorded_at: float
    """Seconds since the epoch, by the log's clock."""
    partition: Partition
    offset: int
    traceparent: str = ""
    number: int = 0
    """The number of a signed publication (`services/log/signatures.py`). 0 if it needs none."""
    signature: RequestSignature | None = None
    """The signature of a request. `signed_by` says whether it is true."""

    def signed_by(self, among: Collection[str]) -> str:
        """Returns the key of a request's signature, if it is true and by one of these keys.

        Returns an empty text if not. It takes about 0.1 ms if the key is one of these.
        """
        return self.signature.proved(among) if self.signature is not None and among else ""

    def refusal(self, trusted: TrustedKeys, tenant: str) -> str:
        """Returns why a request does not count for a tenant; an empty text if it does."""
        if trusted.is_open(tenant):
            return ""
        return trusted.refusal(tenant, self.signed_by(trusted.keys))


class EventLog:
    """Writes and reads the typed events of one namespace's topics."""

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        codec: Codec,
        registry: SchemaRegistry,
        source: str,
        *,
        read_only: bool = False,
        signer: RequestSigner | None = None,
    ) -> None:
        """`source` is the worker's id: the CloudEvents source of all that it writes.

        `signer` signs requests, such as tasks.

        With `read_only`, records that are no events are skipped with a warning and not written to
        `dead-letters`, so that a command that only looks leaves no trace in the namespace.
        """
        self.broker = broker
        self.topics = topics
        self.source = source
        self._read_only = read_only
        self._codec = codec
        self._registry = registry
        self.signer = signer or RequestSigner(None)
        self._publications = SignedPublications(topics)
        self._limits = SignedLimits(topics)
        if not read_only:
            for topic in topics:  # An alert sees no increase of a series that begins with 1.
                DEAD.labels(topic.name)
        self._types = {event: f"headrace.{event.__name__}".encode() for event in EVENTS}
        self._sent = {event: SENT.labels(event.__name__) for event in EVENTS}
        self._constant: Headers = [
            ("ce_specversion", b"1.0"),
            ("ce_source", source.encode()),
            ("content-type", b"application/avro"),
        ]

    async def send(
        self, event: Event, partition: int | None = None, *, awaited: bool = False
    ) -> Ref:
        """Writes an event to its topic. Returns once it is durable.

        If `partition` is None, the event's key decides. `awaited`: the caller waits for nothing
        else, so it learns at once that the event is durable.
        """
        record = self.outgoing(event, partition)
        if awaited:
            record = replace(record, patient=False)
        position = await self.broker.send(record)
        self._sent[type(event)].inc()
        return _ref(position, record.value)

    async def send_all(
        self,
        writer: FencedWriter,
        events: Sequence[Event],
        signer: PublicationSigner | None = None,
    ) -> list[Ref]:
        """Writes all events or none, as the sole writer. Raises Fenced if a successor exists.

        `signer` signs each of the records.
        """
        records = [self.outgoing(event) for event in events]
        if signer is not None:
            records = [signer.sign(record) for record in records]
        positions = await writer.write(records)
        for event in events:
            self._sent[type(event)].inc()
        return [
            _ref(position, record.value)
            for position, record in zip(positions, records, strict=True)
        ]

    def outgoing(self, event: Event, partition: int | None = None) -> Outgoing:
        """The record of an event: topic, key, value, headers. It has no secret that we know.

        A request is signed. Raises UsageError if it needs the signature of another key.
        """
        to = self.topics.route(event)
        value = self._codec.encode(event)
        # The recipe of a run has a digest, and holds only references to secrets.
        if REDACTOR.finds(value) and not isinstance(event, RunStateEntered):
            event = REDACTOR.model(event)
            value = self._codec.encode(event)
        headers = [
            *self._constant,
            ("ce_id", event.event_id.encode()),
            ("ce_type", self._types[type(event)]),
            ("traceparent", next_traceparent().encode()),
        ]
        gathered, patient = to.topic.gathered, _is_patient(event)
        record = Outgoing(to.name, event.key, value, headers, partition, gathered, patient)
        if not isinstance(event, REQUESTS):
            return record
        self.signer.require(self.topics, [event])
        return self.signer.sign(record)

    async def decode(self, record: Record) -> Delivery[Event]:
        """The event in a record of this namespace.

        Raises DecodeError if the record is no event, if the event refers to a trajectory that its
        readers must not fetch or to a partition that is not there, or if it is a publication or a
        change of limits that nobody whom the recipe names has signed.
        """
        name = record.partition.topic
        try:
            topic = self.topics.by_name(name).topic
        except KeyError:
            raise DecodeError(
                f"{name} is not a topic of {self.topics.namespace}", record.value
            ) from None
        event = await self._event(topic, record)
        check_trajectories(event, self.topics, record.value)
        check_partition(event, self.topics, record.value)
        number = self._publications.check(event, record)
        signature = RequestSignature.of(record) if isinstance(event, REQUESTS) else None
        self._limits.check(event, record, signature)
        assert record.value is not None
        trace = next((text for name, text in record.headers if name == "traceparent"), b"")
        return Delivery(
            event,
            _ref(Position(record.partition, record.offset), record.value),
            record.timestamp,
            record.partition,
            record.offset,
            trace.decode("ascii", "replace"),
            number,
            signature,
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
        """Decodes as `decode` does. If the record is no event, parks it and returns None."""
        try:
            return await self.decode(record)
        except DecodeError as error:
            await self.dead_letter(record, error.reason)
            return None

    async def dead_letter(self, record: Record, reason: str) -> None:
        """Parks a record in `dead-letters`, unless the log is `read_only`.

        The dead letter has the record's key, value and headers, unless it is too large, and headers
        for its origin and the reason.
        """
        reason = REDACTOR.text(reason)
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
        topic = self.topics.name(DEAD_LETTERS)
        await self.broker.send(dead_letter_of(record, reason, self.source, topic))

    async def fetch(self, refs: Sequence[Ref]) -> list[Event]:
        """The events that references name, in the given order.

        They may be in the namespaces of `topics.reads_from`, too. Raises RecordsLost if a record
        was deleted, was never written, or is no longer the one that was referred to; DecodeError if
        a topic is not one of Headrace's, or is in any other namespace.
        """
        kinds = {name: readable_topic(name, self.topics) for name in {ref.topic for ref in refs}}
        await self._require_partitions(refs)
        positions = [Position(Partition(ref.topic, ref.partition), ref.offset) for ref in refs]
        events = []
        for ref, record in zip(refs, await self.broker.fetch(positions), strict=True):
            if _digest(record.value or b"") != ref.digest:
                raise RecordsLost(
                    f"{ref.topic}/{ref.partition}@{ref.offset} is not the record that was "
                    f"referred to: its digest differs. Was the topic deleted and created again?"
                )
            events.append(await self._event(kinds[ref.topic], record))
        return events

    async def fetch_each(self, refs: Sequence[Ref]) -> AsyncGenerator[Event | str]:
        """The event that each reference names, in the given order, or why it can't be read.

        Only a few records are in memory at once.
        """
        for first in range(0, len(refs), FETCHED_AT_ONCE):
            some = refs[first : first + FETCHED_AT_ONCE]
            try:
                for event in await self.fetch(some):
                    yield event
            except (HeadraceError, DecodeError):
                for ref in some:
                    try:
                        yield (await self.fetch([ref]))[0]
                    except (RecordsLost, DecodeError) as error:
                        yield str(error)

    async def _require_partitions(self, refs: Sequence[Ref]) -> None:
        """Checks that the partitions exist.

        Any team may write a reference. A wrong one must not look like a broker that is down.
        """
        existing = {topic.name: topic.partitions for topic in self.topics}
        if not existing.keys() >= {ref.topic for ref in refs}:
            existing = await self.broker.list_topics() | existing
        for ref in refs:
            if ref.partition >= existing.get(ref.topic, 0):
                raise RecordsLost(
                    f"{ref.topic}/{ref.partition}@{ref.offset} does not exist: there is no such "
                    f"partition. The record was never written, or its topic was deleted"
                )


def _is_patient(event: Event) -> bool:
    """Whether nobody waits for the acknowledgement alone: an answer to a request proves that the
    request is durable, and who has sent an answer has nothing else to do for it."""
    return isinstance(event, CallEvent) and getattr(event, "kind", "") != "close"


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:16]


def _ref(position: Position, value: bytes) -> Ref:
    return Ref(
        topic=position.partition.topic,
        partition=position.partition.number,
        offset=position.offset,
        digest=_digest(value),
    )
