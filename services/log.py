"""The log of one namespace, typed: events in, events out. Below it are bytes, above it are facts.

Every record carries CloudEvents headers (binary mode) and a W3C `traceparent`, which passes from
the event that is being handled to the events that it causes. What is no event goes to
`dead-letters` whole, with Kafka Connect's headers saying where it lay and why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from prometheus_client import Counter

from schemas.codec import Codec, UnknownSchema
from schemas.events import EVENTS, Event, Ref
from schemas.topics import DEAD_LETTERS, Topic, Topics, topic_of
from services.errors import DecodeError, RecordsLost
from services.kafka.broker import (
    Broker,
    End,
    FencedWriter,
    Headers,
    Outgoing,
    Partition,
    Position,
    Record,
)

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Event, covariant=True)


@dataclass(frozen=True, slots=True)
class Back:
    """So many offsets before the end, or the first that is kept."""

    offsets: int


Start = int | Back | Literal["first", "tail"]
"""Where a reader begins: an offset, the first that is kept, or shortly before the end."""
START_TRIES = 3
"""What is kept is looked up anew where retention deletes it between the look and the reading."""
TAIL = 64
"""Offsets before the end that a `tail` covers, or more: the last event is among them."""

WHY = "__connect.errors."
"""Prefix of the headers that say why a record was parked, and where it lay: Kafka Connect's."""

SENT = Counter("headrace_events_sent_total", "Events sent and durable.", ["event"])
DEAD = Counter("headrace_dead_letters_total", "Records that were no event.", ["topic"])

_trace: ContextVar[str] = ContextVar("headrace_traceparent", default="")


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


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that was in the log when reading began has been read."""


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
            ("traceparent", _next_span(_trace.get()).encode()),
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
        where = {
            "topic": record.partition.topic,
            "partition": str(record.partition.number),
            "offset": str(record.offset),
            "connector.name": self.source,
            "stage": "VALUE_CONVERTER",
            "exception.message": reason,
        }
        headers = [(f"{WHY}{name}", text.encode()) for name, text in where.items()]
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


class EventReader:
    """Whole topics as decoded events, merged; in offset order within a partition.

    Yields one CaughtUp, once all that there was at the first step has been read. With `undecided`
    it waits, for that, until no transaction open at that step hides any of it: so must a sole
    writer read what it wrote.
    """

    def __init__(
        self, log: EventLog, starts: Mapping[Partition, Start], *, undecided: bool = False
    ) -> None:
        self._log = log
        self._starts = dict(starts)
        self._undecided = undecided
        self._reader = log.broker.reader()

    async def __aiter__(self) -> AsyncIterator[Delivery[Event] | CaughtUp]:
        behind = await self._begin()
        if not behind:
            yield CaughtUp()
        while True:
            for item in await self._reader.read():
                if isinstance(item, Record):
                    delivery = await self._log.decode_or_dead_letter(item)
                    if delivery is not None:
                        yield delivery
                if behind and reached(item, behind) and not behind:
                    yield CaughtUp()

    async def _begin(self) -> dict[Partition, int]:
        """Begins to read; the ends of what is to be caught up with. RecordsLost where an offset
        that was asked for is gone."""
        tries = START_TRIES
        while True:
            tries -= 1
            try:
                positions, ends = await resolve_starts(
                    self._log, self._starts, undecided=self._undecided
                )
                await self._reader.assign(positions)
            except RecordsLost:
                if not tries:
                    raise
            else:
                return {place: end for place, end in ends.items() if positions[place] < end}

    async def aclose(self) -> None:
        """Closes the reader beneath."""
        await self._reader.close()


async def read_all(
    log: EventLog, starts: Mapping[Partition, Start], *, undecided: bool = False
) -> AsyncGenerator[Delivery[Event], None]:
    """All that these partitions hold now, merged; `undecided` as EventReader has it."""
    reader = EventReader(log, starts, undecided=undecided)
    try:
        async for item in reader:
            if isinstance(item, CaughtUp):
                return
            yield item
    finally:
        await reader.aclose()


async def resolve_starts(
    log: EventLog, starts: Mapping[Partition, Start], *, undecided: bool = False
) -> tuple[dict[Partition, int], dict[Partition, int]]:
    """The offset that each start means now, and each partition's end (see `Broker.ends`)."""
    bounds = await log.broker.ends(list(starts), undecided=undecided)
    tails = {place: bounds[place] for place, start in starts.items() if start == "tail"}
    positions = {place: first for place, (first, _) in bounds.items()}
    for place, start in starts.items():
        if isinstance(start, int):
            positions[place] = start
        elif isinstance(start, Back):
            first, end = bounds[place]
            positions[place] = max(first, end - start.offsets)
    positions |= await _tails(log, tails)
    return positions, {place: end for place, (_, end) in bounds.items()}


async def _tails(
    log: EventLog, bounds: Mapping[Partition, tuple[int, int]]
) -> dict[Partition, int]:
    """Of each partition an offset at or before its last event. What lies near the end may be none,
    but marks of transactions, records that were taken back, and garbage."""
    begins: dict[Partition, int] = {}
    reach, empty = TAIL, list(bounds)
    while empty:
        for place in empty:
            first, end = bounds[place]
            begins[place] = max(first, end - reach)
        unsure = {at: (begins[at], bounds[at][1]) for at in empty if begins[at] > bounds[at][0]}
        empty = await _without_events(log, unsure)
        reach *= 8
    return begins


async def _without_events(
    log: EventLog, spans: Mapping[Partition, tuple[int, int]]
) -> list[Partition]:
    """The partitions that hold no event from one offset to another."""
    if not spans:
        return []
    behind = {place: end for place, (_, end) in spans.items()}
    empty = list(spans)
    reader = log.broker.reader()
    try:
        await reader.assign({place: begin for place, (begin, _) in spans.items()})
        while behind:
            for item in await reader.read():
                if isinstance(item, Record) and item.partition in behind:
                    with suppress(DecodeError):
                        await log.decode(item)
                        empty.remove(item.partition)
                        del behind[item.partition]
                reached(item, behind)
    finally:
        await reader.close()
    return empty


async def require_beginning(broker: Broker, place: Partition, what: str) -> None:
    """RecordsLost where a partition in which `what` was looked for in vain has lost its beginning.

    A sole writer that finds nothing of its own would begin anew, and write all a second time.
    """
    first, _ = (await broker.ends([place]))[place]
    if first > 0:
        raise RecordsLost(
            f"{place.topic}/{place.number} holds no {what}, and its offsets 0 "
            f"to {first - 1} were deleted: what was decided there is lost, and must not be decided "
            "again. Begin a new namespace"
        )


def reached(item: Record | End, behind: dict[Partition, int]) -> bool:
    """Takes a partition out of `behind` once `item` reaches its end. True where it did."""
    end = behind.get(item.partition)
    position = item.offset + 1 if isinstance(item, Record) else item.offset
    if end is None or position < end:
        return False
    del behind[item.partition]
    return True


def handling(delivery: Delivery[Event]) -> None:
    """Makes what this task sends from now on part of the delivery's trace."""
    _trace.set(delivery.traceparent)


def _next_span(parent: str) -> str:
    """A `traceparent` of a new span: in the parent's trace where there is one."""
    parts = parent.split("-")
    trace = parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""
    trace = trace or f"{random.getrandbits(128):032x}"
    return f"00-{trace}-{random.getrandbits(64):016x}-01"


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:16]


def _ref(position: Position, value: bytes) -> Ref:
    return Ref(
        topic=position.partition.topic,
        partition=position.partition.number,
        offset=position.offset,
        digest=_digest(value),
    )
