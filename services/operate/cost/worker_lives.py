"""When each worker of a run lived, by what it recorded. Pure.

A worker that ended in order recorded its end. One that was killed did not: it counts up to its last
record, and may have lived on until the next one was due.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.schemas.events import InstanceStateEntered
from headrace.schemas.recipe.resources.service_names import pool_name

GRACE_S = 60.0
"""A worker is counted as alive if its next record is late by at most so many seconds."""


@dataclass
class WorkerLife:
    """The life of one worker's process, in seconds since the epoch."""

    pool: str
    service: str
    began_s: float
    last_s: float
    """When its newest record was written."""
    every_s: float
    """Seconds after which its next record is due."""
    ended: bool = False

    def span(self, until_s: float) -> Span:
        """Returns when it lived, as far as it is known at `until_s`."""
        if self.ended:
            return Span(self.began_s, self.last_s)
        if until_s <= self.last_s + self.every_s + GRACE_S:
            late_s = max(0.0, until_s - self.last_s)
            return Span(self.began_s, max(until_s, self.last_s), alive=True, late_s=late_s)
        return Span(self.began_s, self.last_s, unsure_s=self.every_s)


@dataclass(frozen=True)
class Span:
    """A time in which a worker lived, in seconds since the epoch."""

    begin_s: float
    end_s: float
    unsure_s: float = 0.0
    """It may have ended so much later."""
    alive: bool = False
    late_s: float = 0.0
    """If it is alive: the seconds since its last record. Perhaps it was killed meanwhile, and its
    successor is counted, too."""

    @property
    def seconds(self) -> float:
        """Its length. The clocks of worker and broker may differ, so it is never negative."""
        return max(0.0, self.end_s - self.begin_s)


class WorkerLives:
    """Folds the records of workers."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], WorkerLife] = {}
        """By name and beginning: in a container that starts again, a worker has the same name."""

    def on_instance(self, event: InstanceStateEntered, at_s: float) -> None:
        """Adds a record that was written at `at_s`, in seconds since the epoch."""
        if not event.service:
            return
        key = event.instance, event.began_at
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = WorkerLife(
                pool_name(event.service, event.policy),
                event.service,
                event.began_at / 1000,
                at_s,
                event.every_ms / 1000,
            )
        if not life.ended and at_s >= life.last_s:
            life.last_s, life.every_s = at_s, event.every_ms / 1000
            life.ended = event.state in ("gone", "failed")

    def by_pool(self) -> dict[str, list[WorkerLife]]:
        """Returns the lives of each pool, the names of the pools ascending."""
        pools: dict[str, list[WorkerLife]] = {}
        for life in sorted(self._lives.values(), key=lambda one: (one.pool, one.began_s)):
            pools.setdefault(life.pool, []).append(life)
        return pools


def most_at_once(spans: Iterable[Span]) -> int:
    """Returns how many of the spans overlap at most."""
    ends = [(one.begin_s, one.end_s - one.late_s) for one in spans]
    changes = [change for begin, end in ends for change in ((begin, 1), (end, -1))]
    most = now = 0
    for _, change in sorted(changes):  # at the same time, ends come first
        now += change
        most = max(most, now)
    return most


def covered_s(spans: Sequence[Span]) -> float:
    """Returns the seconds in which at least one of the spans lasts."""
    total, until = 0.0, float("-inf")
    for one in sorted(spans, key=lambda one: one.begin_s):
        total += max(0.0, one.end_s - max(one.begin_s, until))
        until = max(until, one.end_s)
    return total
