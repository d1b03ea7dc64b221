"""The events that a story is made of, with their locations in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar, cast

from headrace.schemas.events import Event, Ref
from headrace.services.kafka.broker import Record
from headrace.services.log.event_log import EventLog
from headrace.services.operate.readable import iso, readable

E = TypeVar("E", bound=Event, covariant=True)
T = TypeVar("T", bound=Event)


@dataclass(frozen=True, slots=True)
class Fact(Generic[E]):
    """One event of the log."""

    event: E
    ref: Ref
    recorded_at: float
    """Seconds since the epoch, by the log's clock."""
    writer: str = ""
    """The worker that wrote it: the CloudEvents source."""

    @property
    def location(self) -> str:
        """Its location, as `headrace show` takes it."""
        return location_of(self.ref)

    def to_tree(self) -> dict[str, Any]:
        """Returns the event as JSON values."""
        return {
            "location": self.location,
            "at": iso(self.recorded_at),
            "writer": self.writer,
            "event": readable(self.event),
        }


def location_of(ref: Ref) -> str:
    """Formats a reference as `headrace show` takes it: TOPIC/PARTITION@OFFSET."""
    return f"{ref.topic}/{ref.partition}@{ref.offset}"


def story_tree(part: Any) -> Any:
    """Returns a story, or a part of one, as JSON values: dataclasses become objects."""
    if hasattr(part, "to_tree"):
        return part.to_tree()
    if is_dataclass(part):
        return {one.name: story_tree(getattr(part, one.name)) for one in fields(part)}
    if isinstance(part, list | tuple):
        return [story_tree(one) for one in part]
    return part


async def fact_of(log: EventLog, record: Record) -> Fact[Event]:
    """Decodes a record. Raises DecodeError if it is not an event."""
    delivery = await log.decode(record)
    writer = next((text for name, text in record.headers if name == "ce_source"), b"")
    return Fact(delivery.event, delivery.ref, delivery.recorded_at, writer.decode(errors="replace"))


def of_type(facts: Iterable[Fact[Event]], event_type: type[T]) -> Iterator[Fact[T]]:
    """Yields the facts of one event type. If two have the same id, only the first one counts."""
    seen: set[str] = set()
    for fact in facts:
        if isinstance(fact.event, event_type) and fact.event.event_id not in seen:
            seen.add(fact.event.event_id)
            yield cast("Fact[T]", fact)
