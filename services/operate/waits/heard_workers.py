"""What workers said of themselves: their reports, and the newest records of their lives. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headrace.schemas.events import InstanceStateEntered, LoadReported
from headrace.services.worker.worker_loads import LONGEST_S, SUSPECT_AFTER

MOST_WORKERS = 10_000
"""Workers that are remembered. A run of weeks has more, one after the other."""
LIFE_SLACK_S = 15.0
"""A worker may record its life so much later than it said."""
SILENT_S = SUSPECT_AFTER * LONGEST_S
"""A worker that has not reported for so long shows no more that it lives."""
PAUSED = "no process of this run runs, so it is paused"
CONTINUE = (
    "`headrace run RECIPE` continues it. If its workers run on several machines, start its "
    "services there again: `headrace serve SERVICE RECIPE`"
)


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

    @property
    def has_ended(self) -> bool:
        """Whether the worker has said that it ended."""
        return self.state in ("gone", "failed")

    def lives(self, now: float) -> bool:
        """Whether the worker lives, as far as its records say: a killed one does for a minute or
        more."""
        late = self.every_s > 0 and now - self.at > self.every_s + LIFE_SLACK_S
        return not (self.has_ended or late)


class HeardWorkers:
    """Folds the reports and life records of workers. All times are epoch seconds."""

    def __init__(self, policies: Collection[str], most: int = MOST_WORKERS) -> None:
        self.newest: dict[str, tuple[float, bool]] = {}
        """Worker to when its newest report came, and whether it said that it leaves."""
        self.newest_of: dict[tuple[str, str], tuple[float, bool]] = {}
        """The same by policy and worker."""
        self.first: dict[str, float] = {}
        """Worker to when the first of its reports came that was read."""
        self.lives: dict[str, LifeRecord] = {}
        """Worker to its newest record of life, the newest one last."""
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

    def on_life(self, event: InstanceStateEntered, at: float) -> None:
        """Adds a record of a worker's life. What is none is left out."""
        if event.kind != "worker" or not event.service:
            return
        self.lives.pop(event.worker, None)
        self.lives[event.worker] = LifeRecord(
            event.service, event.policy, event.state, event.reason, at, event.every_ms / 1000,
            event.host, event.worker,
        )  # fmt: skip
        if len(self.lives) > self._most:
            del self.lives[next(iter(self.lives))]

    def ended_at(self, now: float, gone: Collection[str] = ()) -> float | None:
        """Returns when a worker was heard of last, if none lives any more.

        None: one lives or reports, or none has recorded its life. `gone` are the workers whose
        processes have gone.
        """
        reports = any(not left and now - at < SILENT_S for at, left in self.newest.values())
        if reports or any(one.lives(now) for name, one in self.lives.items() if name not in gone):
            return None
        return max((one.at for one in self.lives.values()), default=None)
