"""Workers that fail, and are passed over for a while. Pure: the caller has the clock.

A worker that fails answers faster than the others, so by load alone it would get nearly all work.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

AVOIDED_S = (1.0, 60.0)
"""Seconds for which a worker is passed over after a failure: at first, and at most. They double
with each further failure."""

W = TypeVar("W")


class FailingWorkers(Generic[W]):
    """Whom to pass over, and until when."""

    def __init__(self) -> None:
        self._failures: dict[W, tuple[float, float]] = {}
        """For how long a worker that failed is passed over, and until when."""

    def __len__(self) -> int:
        return len(self._failures)

    def on_success(self, worker: W) -> None:
        """Notes that a worker works."""
        self._failures.pop(worker, None)

    def on_failure(self, worker: W, now_s: float) -> None:
        """Notes that a worker failed. Of failures while it is passed over, the first one counts."""
        first, most = AVOIDED_S
        avoided_s, until_s = self._failures.get(worker, (first / 2, 0.0))
        if now_s >= until_s:
            avoided_s = min(2 * avoided_s, most)
            self._failures[worker] = avoided_s, now_s + avoided_s

    def is_passed_over(self, worker: W, now_s: float) -> bool:
        """Whether a worker failed lately."""
        return now_s < self._failures.get(worker, (0.0, 0.0))[1]

    def keep(self, alive: Collection[W]) -> None:
        """Forgets all workers but these."""
        self._failures = {name: one for name, one in self._failures.items() if name in alive}
