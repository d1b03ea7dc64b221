"""A resource that its jobs share, in virtual time: an engine's compute, or a link's bandwidth."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import inf
from typing import Generic, TypeVar

J = TypeVar("J")


class Events:
    """What happens when. Two things of one moment happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, at_s: float, happens: Callable[[], None]) -> None:
        """Adds an event. One that is late happens now."""
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._numbers), happens))

    def after(self, seconds: float, happens: Callable[[], None]) -> None:
        """Adds an event that happens in so many seconds."""
        self.at(self.now_s + seconds, happens)

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Lets events happen until `done`, the time is over, or nothing is left."""
        while self._heap and not done():
            at_s, _, happens = heapq.heappop(self._heap)
            if at_s > until_s:
                return
            self.now_s = at_s
            happens()


class Shared(Generic[J]):
    """Jobs that all get the same share of what they could use.

    A job takes `work_s` seconds if it gets all that it can use, and uses `demand` of the resource,
    which has `capacity`, all the while. If they want more than there is, each is slowed down alike.
    """

    def __init__(
        self, events: Events, done: Callable[[J], None], capacity: Callable[[], float]
    ) -> None:
        self._events = events
        self._done = done
        self._capacity = capacity
        self._progress = 0.0
        """Seconds of work that a job would have done that was always there."""
        self._at_s = events.now_s
        self._ends: list[tuple[float, int, J]] = []
        self._jobs: dict[int, float] = {}
        """Number of a job that is there, to its demand."""
        self._wanted = 0.0
        self._numbers = count()
        self._scheduled = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: J, work_s: float, demand: float) -> int:
        """Adds a job. Returns its number."""
        self._advance()
        number = next(self._numbers)
        self._jobs[number] = demand
        self._wanted += demand
        heapq.heappush(self._ends, (self._progress + work_s, number, job))
        self._schedule()
        return number

    def remove(self, number: int) -> None:
        """Takes a job away that has not ended."""
        self._advance()
        self._wanted -= self._jobs.pop(number)
        self._schedule()

    def changed(self) -> None:
        """Notes that the capacity is another one from now on. Call `before_change` before."""
        self._schedule()

    def before_change(self) -> None:
        """Counts the work until now with the old capacity."""
        self._advance()

    def _rate(self) -> float:
        capacity = self._capacity()
        return min(1.0, capacity / self._wanted) if self._wanted > 1e-12 else float(capacity > 0)

    def _advance(self) -> None:
        self._progress += (self._events.now_s - self._at_s) * self._rate()
        self._at_s = self._events.now_s

    def _schedule(self) -> None:
        while self._ends and self._ends[0][1] not in self._jobs:
            heapq.heappop(self._ends)
        self._scheduled += 1
        rate, scheduled = self._rate(), self._scheduled
        left_s = max(0.0, self._ends[0][0] - self._progress) / rate if self._ends and rate else inf
        if left_s < inf:
            self._events.after(left_s, lambda: self._end(scheduled))

    def _end(self, scheduled: int) -> None:
        if scheduled != self._scheduled:
            return
        self._advance()
        _, number, job = heapq.heappop(self._ends)
        self._wanted -= self._jobs.pop(number)
        if not self._jobs:
            self._wanted = 0.0
        self._schedule()
        self._done(job)
