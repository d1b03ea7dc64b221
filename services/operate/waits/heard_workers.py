"""What workers said of themselves: their reports, and the newest records of their lives. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.schemas.events import LoadReported

MOST_WORKERS = 10_000
"""Workers that are remembered. A run of weeks has more, one after the other."""


@dataclass(frozen=True, slots=True)
class LifeRecord:
    """The newest record of a worker's process."""

    service: str
    policy: str
    state: str
    reason: str
    at: float
    every_s: float
    host: str = ""
    worker: str = ""
    """Its id, which ends with the number of its process."""


class HeardWorkers:
    """Folds the reports of workers. All times are epoch seconds."""

    def __init__(self, policies: Collection[str], most: int = MOST_WORKERS) -> None:
        self.newest: dict[str, tuple[float, bool]] = {}
        """Worker to when its newest report came, and whether it said that it leaves."""
        self.newest_of: dict[tuple[str, str], tuple[float, bool]] = {}
        """The same by policy and worker."""
        self.first: dict[str, float] = {}
        """Worker to when the first of its reports came that was read."""
        self._policies, self._most = policies, most

    def on_report(self, report: LoadReported, at: float) -> None:
        """Adds a report that came at `at`. Beyond the bound, the worker that was heard of longest
        ago is forgotten."""
        worker, said = report.worker, (at, report.leaving)
        self.newest.pop(worker, None)
        self.newest[worker] = said
        self.first.setdefault(worker, at)
        for pool in report.pools:
            if pool.policy in self._policies:
                self.newest_of[pool.policy, worker] = said
        if len(self.newest) > self._most:
            oldest = next(iter(self.newest))
            del self.newest[oldest], self.first[oldest]
            for policy in self._policies:
                self.newest_of.pop((policy, oldest), None)
