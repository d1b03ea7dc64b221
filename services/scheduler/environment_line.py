"""The line of the tasks that found too little room in their environment or image. Pure.

There is one order over all limits, by the times that `environment_room.py` gives. Tasks that differ
only in their tenants need the same room, so of these only the first one is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from headrace.services.scheduler.waiting_tasks import WaitingTask

MOST_IN_LINE = 10_000
"""At most so many different tasks stand in the line, of some 500 bytes each."""

Place = tuple[float, int]
"""A task's time, and among equal times the order in which they came."""


@dataclass(eq=False, slots=True)
class AlikeInLine:
    """Tasks in the line that differ only in their tenants."""

    needs: tuple[str, ...]
    """The limits that they count for."""
    first: WaitingTask
    places: dict[WaitingTask, Place] = field(default_factory=dict)


class EnvironmentLine:
    """The tasks in line, by what they need."""

    def __init__(self) -> None:
        self._alike: dict[WaitingTask, AlikeInLine] = {}
        """By such a task without its tenant."""
        self._needing: dict[str, dict[WaitingTask, AlikeInLine]] = {}
        """The same by the limits that they need."""
        self._times: dict[WaitingTask, float] = {}
        self._came = 0

    def __len__(self) -> int:
        """How many tasks stand in the line."""
        return len(self._times)

    def time(self, task: WaitingTask) -> float | None:
        """Returns the time of a task. None: it is not in the line."""
        return self._times.get(task)

    def join(self, task: WaitingTask, time: float, needs: tuple[str, ...]) -> None:
        """Puts a task into the line, if there is a place and it has none."""
        if task in self._times or len(self._times) >= MOST_IN_LINE:
            return
        kind, self._came = _kind(task), self._came + 1
        if (alike := self._alike.get(kind)) is None:
            alike = self._alike[kind] = AlikeInLine(needs, task)
            for name in needs:
                self._needing.setdefault(name, {})[kind] = alike
        place = alike.places[task] = time, self._came
        self._times[task] = time
        if place < alike.places[alike.first]:
            alike.first = task

    def leave(self, task: WaitingTask) -> None:
        """Takes a task out of the line, if it is there."""
        if self._times.pop(task, None) is None:
            return
        kind = _kind(task)
        alike = self._alike[kind]
        del alike.places[task]
        if not alike.places:
            del self._alike[kind]
            for name in alike.needs:
                del self._needing[name][kind]
        elif alike.first == task:
            alike.first = min(alike.places, key=alike.places.__getitem__)

    def before(
        self, task: WaitingTask, time: float, names: Iterable[str]
    ) -> Iterator[tuple[WaitingTask, tuple[str, ...]]]:
        """Yields which tasks that need one of these limits are before a task, and what they need.

        `time` is that of the task. Of tasks that are alike, it yields the first.
        """
        seen: set[WaitingTask] = set()
        mine = self._alike.get(_kind(task))
        place = mine.places.get(task, (time, self._came)) if mine else (time, self._came)
        for name in names:
            for kind, alike in self._needing.get(name, {}).items():
                if kind not in seen and alike.places[alike.first] <= place:
                    seen.add(kind)
                    if alike.first != task:
                        yield alike.first, alike.needs


def _kind(task: WaitingTask) -> WaitingTask:
    return replace(task, tenant="")
