"""Facts for stories: events with their places, and the first of each id only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, cast

from headrace.schemas.events import Event, Ref
from headrace.services.kafka.broker import Record
from headrace.services.log.event_log import EventLog
from headrace.services.operate.readable import readable

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
    """Who wrote it: the CloudEvents source."""

    @property
    def place(self) -> str:
        """Where it lies, as an id for `headrace show`."""
        return place_of(self.ref)

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "place": self.place,
            "at": iso(self.recorded_at),
            "writer": self.writer,
            "event": readable(self.event),
        }


def place_of(ref: Ref) -> str:
    """A reference as people write it."""
    return f"{ref.topic}/{ref.partition}@{ref.offset}"


def iso(at: float) -> str:
    """A time for people and JSON: UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


async def fact_of(log: EventLog, record: Record) -> Fact[Event]:
    """The fact in a record. DecodeError where there is none."""
    delivery = await log.decode(record)
    writer = next((text for name, text in record.headers if name == "ce_source"), b"")
    return Fact(delivery.event, delivery.ref, delivery.recorded_at, writer.decode(errors="replace"))


def of_type(facts: Iterable[Fact[Event]], event_type: type[T]) -> Iterator[Fact[T]]:
    """The facts of one event type, the first of each id: that is the one that counts."""
    seen: set[str] = set()
    for fact in facts:
        if isinstance(fact.event, event_type) and fact.event.event_id not in seen:
            seen.add(fact.event.event_id)
            yield cast("Fact[T]", fact)
