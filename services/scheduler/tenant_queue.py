"""The tasks of one tenant that wait. Pure.

Each kind of task has a line of its own, in submission order. Tasks of one kind wait for the same
limits of environments and images, so those of other kinds may pass them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Line:
    """The numbers of the tasks of one kind, ascending. The first one waits."""

    numbers: deque[int] = field(default_factory=deque)
    gone: int = 0
    """How many of the numbers no longer wait."""

    def remove_one(self, waits: Container[int]) -> None:
        """Notes that one of the tasks no longer waits."""
        self.gone += 1
        while self.numbers and self.numbers[0] not in waits:
            self.numbers.popleft()
            self.gone -= 1
        if self.gone > len(self.numbers) // 2:
            self.numbers = deque(one for one in self.numbers if one in waits)
            self.gone = 0


class TenantQueue:
    """The numbers of a tenant's tasks. It has as many lines as there are kinds that wait."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self.first = -1
        """The oldest task that waits. -1 without one."""

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, number: int, kind: Hashable) -> None:
        """Adds a task. The tasks come in ascending order of their numbers."""
        if not self._lines:
            self.first = number
        self._lines.setdefault(kind, _Line()).numbers.append(number)

    def remove(self, number: int, kind: Hashable, waits: Container[int]) -> None:
        """Removes a task, which is no longer in `waits`."""
        line = self._lines[kind]
        line.remove_one(waits)
        if not line.numbers:
            del self._lines[kind]
        if number == self.first:
            self.first = min((one.numbers[0] for one in self._lines.values()), default=-1)

    def heads(self) -> list[int]:
        """Returns the first task of each kind, ascending."""
        if len(self._lines) == 1:
            return [self.first]
        return sorted(line.numbers[0] for line in self._lines.values())
