"""What the workers of each policy can do now, as their reports say. Pure: the caller has the clock.

One missed report changes nothing. If SUSPECT_AFTER of them are missing, the worker is suspected: it
gets nothing new as long as another one is there. If GONE_AFTER are missing, it is forgotten. Its
partitions have other owners by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.schemas import packed
from headrace.schemas.events import LoadReported, PoolLoad

SUSPECT_AFTER = 3
"""A worker is suspected if it has been silent for so many times the time between its reports."""
GONE_AFTER = 10
"""It is gone if it has been silent for so many times that."""
LONGEST_S = 5.0
"""Reports that come less often than this count as if they came so often."""
MOST_WORKERS = 10_000
"""Workers of a policy that are remembered. Further ones are not used."""


@dataclass(frozen=True, slots=True)
class KnownLoad:
    """The newest report of a worker about one policy."""

    worker: str
    load: PoolLoad
    """The report, without the packed partitions."""
    partitions: Sequence[int]
    suspect_at: float
    gone_at: float

    def is_suspected(self, now_s: float) -> bool:
        """Whether too many of its reports are missing."""
        return now_s >= self.suspect_at


class WorkerLoads:
    """The newest report of each worker."""

    def __init__(self, policies: Iterable[str], partitions: int) -> None:
        """Reports about other policies are ignored, and so are partitions that a policy's prompts,
        which have so many `partitions`, do not have."""
        self._partitions = partitions
        self._known: dict[str, dict[str, KnownLoad]] = {policy: {} for policy in policies}
        """By policy and worker."""

    def on_report(self, report: LoadReported, now_s: float) -> None:
        """Takes a report that came at `now_s`. It replaces the worker's last one."""
        every_s = min(report.every_ms / 1000, LONGEST_S)
        loads = {} if report.leaving else {load.policy: load for load in report.pools}
        for policy, known in self._known.items():
            load = loads.get(policy)
            if load is None or (report.worker not in known and len(known) >= MOST_WORKERS):
                known.pop(report.worker, None)
                continue
            known[report.worker] = KnownLoad(
                report.worker,
                load.model_copy(update={"partitions": b""}),
                self._held(load),
                now_s + SUSPECT_AFTER * every_s,
                now_s + GONE_AFTER * every_s,
            )

    def _held(self, load: PoolLoad) -> list[int]:
        """The partitions that a worker says it has: any program may write any bytes."""
        try:
            numbers = packed.unpack_i32(load.partitions)
        except ValueError:
            return []
        return sorted({one for one in numbers if 0 <= one < self._partitions})

    def alive(self, policy: str, now_s: float) -> list[KnownLoad]:
        """Returns all workers of a policy that have not left and are not gone."""
        known = self._known.get(policy, {})
        for gone in [one.worker for one in known.values() if now_s >= one.gone_at]:
            del known[gone]
        return list(known.values())

    def of(self, policy: str, now_s: float) -> list[KnownLoad]:
        """Returns the workers to which a prompt of a policy may go.

        They have slots and partitions, and are not suspected. If all are suspected, they are
        returned as well.
        """
        able = [one for one in self.alive(policy, now_s) if one.load.slots and one.partitions]
        return [one for one in able if not one.is_suspected(now_s)] or able

    def is_served(self, policy: str, now_s: float) -> bool:
        """Whether a worker that is not suspected can take a prompt of a policy."""
        return any(not one.is_suspected(now_s) for one in self.of(policy, now_s))

    def waiting_per_slot(self, policy: str, now_s: float, more: int = 0) -> float:
        """Returns how many prompts of a policy wait for each of its slots, if `more` come.

        0 without workers.
        """
        loads = [one.load for one in self.of(policy, now_s)]
        slots = sum(one.slots for one in loads)
        free = sum(max(0, one.slots - one.busy) for one in loads)
        waiting = sum(one.waiting for one in loads) + max(0, more - free)
        return waiting / slots if slots else 0.0
