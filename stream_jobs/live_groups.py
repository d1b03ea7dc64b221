"""The groups that were started and are not closed, and when one of them is late. No I/O, no clock.

All times are in epoch seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe

OVERDUE_S = 60.0
"""Seconds after a group's deadline, and the time of its teachers, when nothing waits for it any
more."""
REMEMBERED = 64
"""So many lengths of groups are known: the newest ones."""
READ_AGAIN = 1024
"""So many decided records of `groups` are read again at a start. Those of evaluations, and of
groups whose episodes all failed, have no length."""
ENOUGH = 16
"""If fewer lengths are known, no group is late before it is overdue."""
USUAL, LATE = 0.9, 1.5
"""A group is late when it has taken LATE times as long as the share USUAL of the known groups
did at most. Probably it hangs. tests/bench/closed_loop.py compares other values."""


def longest_teacher_s(recipe: Recipe) -> float:
    """Returns the most seconds that an episode waits for a teacher, maybe after its deadline."""
    trained = [one.training for one in recipe.policies.values() if one.training is not None]
    return max((one.teacher_s for one in trained if one.teacher), default=0.0)


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A group that was started and is not closed."""

    version: int
    """The newest version when it was started."""
    started_s: float
    overdue_s: float
    """When its episodes should have ended: nothing waits for it after that."""


class LiveGroups:
    """The live groups of one policy by task, and the lengths of the newest closed ones.

    A successor that reads the newest records of `groups` again knows the same lengths.
    """

    def __init__(self) -> None:
        self._live: dict[int, LiveGroup] = {}
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        """In log order."""

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, task: int) -> bool:
        return task in self._live

    def start(self, task: int, version: int, started_s: float, ends_s: float) -> None:
        """Adds a group that is started while `version` is the newest one.

        `ends_s` is when its last episode should end.
        """
        self._live[task] = LiveGroup(version, started_s, ends_s + OVERDUE_S)

    def close(self, task: int, seconds: float) -> None:
        """Removes a group, and notes how long it took. 0 if that says nothing."""
        self._live.pop(task, None)
        if seconds > 0:
            self._seconds.append(seconds)

    def forget(self, decided: Frontier) -> None:
        """Removes the groups whose tasks are decided."""
        self._live = {task: one for task, one in self._live.items() if task not in decided}

    def running(self, now_s: float) -> list[LiveGroup]:
        """Returns the groups that may still be closed in time."""
        return [one for one in self._live.values() if now_s < one.overdue_s]

    def punctual(self, now_s: float) -> list[LiveGroup]:
        """Returns the groups among these that are not late."""
        late_s = self._late_s()
        return [one for one in self.running(now_s) if now_s < one.started_s + late_s]

    def moments(self) -> Iterator[float]:
        """Yields when a group becomes late or overdue."""
        late_s = self._late_s()
        for group in self._live.values():
            yield group.started_s + late_s
            yield group.overdue_s

    def _late_s(self) -> float:
        known = sorted(self._seconds)
        if len(known) < ENOUGH:
            return math.inf
        return LATE * known[math.ceil(USUAL * len(known)) - 1]
