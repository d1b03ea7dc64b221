"""Counts dead letters by topic and reason, and those that wait to be redriven. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_KINDS = 1_000
"""Most kinds of dead letters that are separated. All others are counted together."""
SHOWN_NUMBERS = 3
"""Most numbers of dead letters that are kept for each kind."""
MOST_NUMBERS = 200_000
"""Dead letters whose kind is remembered, the newest ones. If an older one is redriven, only the
number of those that wait knows."""


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
    """Folds `dead-letters` in its order."""

    def __init__(self) -> None:
        self.waiting = 0
        """Dead letters that were not redriven."""
        self._first: int | None = None
        """The number of the first one. Earlier ones may have been deleted by retention."""
        self._kinds: dict[tuple[str, str], DeadLetterKind] = {}
        self._kind_of: OrderedDict[int, DeadLetterKind] = OrderedDict()

    def on_dead_letter(self, number: int, topic: str, reason: str, at: float) -> None:
        """Adds a dead letter that was written at `at`, in epoch seconds."""
        if self._first is None:
            self._first = number
        key = (topic, reason)
        if key not in self._kinds and len(self._kinds) >= MAX_KINDS:
            key = ("", "other reasons")
        kind = self._kind_of[number] = self._kinds.setdefault(key, DeadLetterKind(*key))
        if len(self._kind_of) > MOST_NUMBERS:
            self._kind_of.popitem(last=False)
        self.waiting += 1
        kind.count += 1
        kind.last_at = max(kind.last_at, at)
        if len(kind.first) < SHOWN_NUMBERS:
            kind.first.append(number)

    def on_redriven(self, number: int) -> None:
        """Adds the mark that a dead letter was redriven. There is one for each."""
        if self._first is None or number < self._first:
            return
        self.waiting -= 1
        if (kind := self._kind_of.pop(number, None)) is not None:
            kind.redriven += 1

    def kinds(self) -> list[DeadLetterKind]:
        """Returns the kinds. The one with the newest dead letter is last."""
        return sorted(self._kinds.values(), key=lambda kind: kind.last_at)
