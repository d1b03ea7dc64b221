"""A log's events, sorted: by type and id, and by where they lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.schemas.events import Event, Ref, TaskSubmitted
from headrace.services.log.event_log import Delivery

E = TypeVar("E", bound=Event)
Violations = Iterator[str]
"""Each begins with the invariant that it breaks, as `I3: `."""


@dataclass
class Facts:
    """The events of a log. Of several with one id the first counts."""

    tasks: dict[int, Delivery[TaskSubmitted]] = field(default_factory=dict)
    """By number. A task submitted twice is two tasks, the second of which is refused."""
    first: dict[type[Event], dict[str, Delivery[Any]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    again: dict[type[Event], list[Delivery[Any]]] = field(default_factory=lambda: defaultdict(list))
    positions: dict[tuple[str, int, int], Delivery[Any]] = field(default_factory=dict)
    """By topic, partition and offset."""
    records: dict[type[Event], dict[str, list[Delivery[Any]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Every record of each id, in the log's order."""

    @classmethod
    def of(cls, deliveries: Iterable[Delivery[Event]]) -> Facts:
        """Sorts a log. Deliveries of one partition come in offset order."""
        facts = cls()
        for one in deliveries:
            event, kind = one.event, type(one.event)
            facts.positions[one.partition.topic, one.partition.number, one.offset] = one
            if isinstance(event, TaskSubmitted):
                facts.tasks[one.offset] = one  # type: ignore[assignment]
                continue
            identity = event.event_id
            facts.records[kind][identity].append(one)
            if identity in facts.first[kind]:
                facts.again[kind].append(one)
            else:
                facts.first[kind][identity] = one
        return facts

    def all(self, kind: type[E]) -> list[Delivery[E]]:
        """The first record of each id."""
        return list(self.first[kind].values())

    def events(self, kind: type[E]) -> list[E]:
        """The events that count. Tasks are in `tasks`."""
        assert kind is not TaskSubmitted
        return [one.event for one in self.first[kind].values()]

    def get(self, kind: type[E], *identity: object) -> E | None:
        """The event that counts, by the fields of its id."""
        found = self.first[kind].get("/".join(map(str, identity)))
        return None if found is None else found.event

    def every(self, kind: type[E], *identity: object) -> list[E]:
        """All events of an id, those that don't count too."""
        return [one.event for one in self.records[kind].get("/".join(map(str, identity)), ())]

    def in_order(self, kind: type[E]) -> list[Delivery[E]]:
        """Every record of a type, repetitions too, by offset: for topics of one partition."""
        records = [one for same in self.records[kind].values() for one in same]
        return sorted(records, key=lambda one: one.offset)

    def resolve(self, ref: Ref) -> Event | None:
        """What a reference names; None where that is absent, or is another record."""
        found = self.positions.get((ref.topic, ref.partition, ref.offset))
        return None if found is None or found.ref.digest != ref.digest else found.event
