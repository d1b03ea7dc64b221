"""Counts dead letters by topic and reason, and those that wait to be redriven. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_KINDS = 1_000
"""Most kinds of dead letters that are separated. All others are counted together."""
SHOWN_NUMBERS = 3
"""Most numbers of dead letters that are kept for each kind."""
MOST_NUMBERS = 200_000
"""Dead letters whose kind and record are remembered, the newest ones. If an older one is redriven,
only the number of those that wait knows."""


@dataclass(slots=True)
class DeadLetterKind:
    """The dead letters of one topic with one reason."""

    topic: str
    reason: str
    count: int = 0
    redriven: int = 0
    first: list[int] = field(default_factory=list)
    """The numbers of the first few."""
    last_at: float = 0.0
    """Epoch seconds of the newest one."""


class DeadLetterCount:
    """Folds `dead-letters` in its order.

    Each consumer that can't decode a record writes a dead letter of it. All of them count as
    redriven once one of them is, because the record is redriven only once.
    """

    def __init__(self) -> None:
        self.waiting = 0
        """Dead letters whose record was not redriven."""
        self._first: int | None = None
        """The number of the first one. Earlier ones may have been deleted by retention."""
        self._forgotten = -1
        """The highest number that waits and is not remembered any more."""
        self._kinds: dict[tuple[str, str], DeadLetterKind] = {}
        # Locations are kept as hashes: any program may write long ones.
        self._open: OrderedDict[int, tuple[DeadLetterKind, int]] = OrderedDict()
        """The kind and the location of each number that waits."""
        self._numbers: dict[int, set[int]] = {}
        """The same numbers by location."""
        self._done: OrderedDict[int, None] = OrderedDict()
        """The locations of redriven records."""

    def on_dead_letter(
        self, number: int, location: str, topic: str, reason: str, at: float
    ) -> None:
        """Adds a dead letter of the record at `location`, written at `at`, in epoch seconds."""
        if self._first is None:
            self._first = number
        key = (topic, reason)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            key = ("", "other reasons")
        kind = self._kinds.setdefault(key, DeadLetterKind(*key))
        kind.count += 1
        kind.last_at = max(kind.last_at, at)
        if len(kind.first) < SHOWN_NUMBERS:
            kind.first.append(number)
        record = hash(location)
        if record in self._done:
            kind.redriven += 1
            return
        self.waiting += 1
        self._open[number] = kind, record
        self._numbers.setdefault(record, set()).add(number)
        if len(self._open) > MOST_NUMBERS:
            self._forgotten = next(iter(self._open))
            self._close(self._forgotten)

    def on_redriven(self, number: int) -> None:
        """Adds the mark that the record of a dead letter was redriven."""
        if self._first is None or number < self._first:
            return
        if number in self._open:
            _, record = self._open[number]
            self._done[record] = None
            if len(self._done) > MOST_NUMBERS:
                self._done.popitem(last=False)
            for each in sorted(self._numbers[record]):
                self.waiting -= 1
                self._close(each).redriven += 1
        elif number <= self._forgotten:
            self.waiting -= 1

    def _close(self, number: int) -> DeadLetterKind:
        """Forgets the location of a number that waits. Returns its kind."""
        kind, record = self._open.pop(number)
        self._numbers[record].remove(number)
        if not self._numbers[record]:
            del self._numbers[record]
        return kind

    def kinds(self) -> list[DeadLetterKind]:
        """Returns the kinds. The one with the newest dead letter is last."""
        return sorted(self._kinds.values(), key=lambda kind: kind.last_at)
