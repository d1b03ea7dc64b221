"""Numbers the requests of an episode so that a second run gives them the same names.

"1", "2", … on one line of control; what runs at the same time, as the second request of all, has
"2.1.1", "2.1.2", … on its first branch and "2.2.1", … on its second, in whatever order they ask.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Branch:
    """One line of control."""

    prefix: str = ""
    calls: int = 0
    last_turn: str | None = None
    """Call of its newest turn: a step's reward belongs to it."""

    def next(self) -> str:
        """The path of its next request."""
        self.calls += 1
        return f"{self.prefix}{self.calls}"


_branch: ContextVar[Branch] = ContextVar("headrace_branch")


def begin_branch(prefix: str = "") -> None:
    """Has this asyncio task go on as a branch of its own."""
    _branch.set(Branch(prefix))


def branch() -> Branch:
    """The line of control that this asyncio task is on."""
    return _branch.get()
