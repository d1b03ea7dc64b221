"""What the workers of each policy or environment can do now, as their reports say. Pure.

The caller has the clock. One missed report changes nothing. If SUSPECT_AFTER of them are missing,
the worker is suspected: it gets nothing new as long as another one is there. If GONE_AFTER are
missing, it is forgotten. Its partitions have other owners by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

from headrace.schemas import packed
from headrace.schemas.events import EnvironmentLoad, LoadReported, PoolLoad

SUSPECT_AFTER = 3
"""A worker is suspected if it has been silent for so many times the time between its reports."""
GONE_AFTER = 10
"""It is gone if it has been silent for so many times that."""
LONGEST_S = 5.0
"""Reports that come less often than this count as if they came so often."""
MOST_WORKERS = 10_000
"""Workers of a policy or environment that are remembered. Further ones are not used."""

L = TypeVar("L", PoolLoad, EnvironmentLoad)


@dataclass(frozen=True, slots=True)
class KnownLoad(Generic[L]):
    """The newest report of a worker about one policy or environment."""

    worker: str
    load: L
    """The report. Its packed partitions may be missing."""
    partitions: Sequence[int]
    every_s: float
    """The time between two reports of the worker, at most LONGEST_S."""
    suspect_at: float
    gone_at: float

    def is_suspected(self, now_s: float) -> bool:
        """Whether too many of its reports are missing."""
        return now_s >= self.suspect_at


class _Usable(Generic[L]):
    """The workers of one policy or environment to which something may go.

    All are looked through only if somebody comes or goes. So with thousands of workers, a choice
    among a few of them and a report cost no more than with ten.
    """

    def __init__(self) -> None:
        self.found: list[KnownLoad[L]] = []
        self.from_s = self.until_s = 0.0
        """When `found` is right, if all changes were taken."""
        self._indexes: dict[str, int] = {}
        """By worker: its index in `found`."""

    def take(
        self, worker: str, before: KnownLoad[L] | None, now: KnownLoad[L] | None, now_s: float
    ) -> None:
        """Takes a worker's new report, and what was known before."""
        index, is_able = self._indexes.get(worker), now is not None and _is_able(now)
        if index is None:
            changed = is_able
        else:
            changed = not is_able or before is None or before.is_suspected(now_s)
        if changed:
            self.until_s = self.from_s
        elif index is not None and now is not None:
            self.found[index] = now
            self.until_s = min(self.until_s, now.suspect_at)

    def find(self, alive: Sequence[KnownLoad[L]], now_s: float) -> None:
        """Finds them among all that are alive."""
        able = [one for one in alive if _is_able(one)]
        self.found = [one for one in able if not one.is_suspected(now_s)] or able
        self._indexes = {one.worker: index for index, one in enumerate(self.found)}
        changes = [one.gone_at if one.is_suspected(now_s) else one.suspect_at for one in able]
        self.from_s, self.until_s = now_s, min(changes, default=inf)


def _is_able(known: KnownLoad[L]) -> bool:
    return bool(known.load.slots and known.partitions)


class Loads(Generic[L]):
    """The newest report of each worker about each of some policies or environments."""

    def __init__(self, names: Iterable[str], partitions: int) -> None:
        """Reports about others than these `names` are ignored, and so are partitions that their
        topic, which has so many `partitions`, does not have."""
        self._partitions = partitions
        self._known: dict[str, dict[str, KnownLoad[L]]] = {name: {} for name in names}
        """By name and worker."""
        self._usable: dict[str, _Usable[L]] = {name: _Usable() for name in self._known}

    def _reported(self, report: LoadReported) -> Mapping[str, L]:
        """Returns what a report says of each policy or environment."""
        raise NotImplementedError

    def on_report(self, report: LoadReported, now_s: float) -> None:
        """Takes a report that came at `now_s`. It replaces the worker's last one."""
        every_s = min(report.every_ms / 1000, LONGEST_S)
        loads = {} if report.leaving else self._reported(report)
        for name, known in self._known.items():
            load, before = loads.get(name), known.get(report.worker)
            if load is None or (before is None and len(known) >= MOST_WORKERS):
                known.pop(report.worker, None)
                self._usable[name].take(report.worker, before, None, now_s)
                continue
            held = self._held(load, before)
            if len(load.partitions) > 4 * self._partitions:
                load = load.model_copy(update={"partitions": b""})
            found = known[report.worker] = KnownLoad(
                report.worker,
                load,
                held,
                every_s,
                now_s + SUSPECT_AFTER * every_s,
                now_s + GONE_AFTER * every_s,
            )
            self._usable[name].take(report.worker, before, found, now_s)

    def _held(self, load: L, before: KnownLoad[L] | None) -> Sequence[int]:
        """The partitions that a worker says it has: any program may write any bytes."""
        if before is not None and load.partitions and load.partitions == before.load.partitions:
            return before.partitions
        try:
            numbers = packed.unpack_i32(load.partitions)
        except ValueError:
            return []
        return sorted({one for one in numbers if 0 <= one < self._partitions})

    def alive(self, name: str, now_s: float) -> list[KnownLoad[L]]:
        """Returns all workers of a policy or environment that have not left and are not gone."""
        known = self._known.get(name, {})
        for gone in [one.worker for one in known.values() if now_s >= one.gone_at]:
            del known[gone]
        return list(known.values())

    def of(self, name: str, now_s: float) -> Sequence[KnownLoad[L]]:
        """Returns the workers to which a prompt of a policy or an action may go.

        They have slots and partitions, and are not suspected. If all are suspected, they are
        returned as well. The sequence changes with the next report.
        """
        usable = self._usable.get(name)
        if usable is None:
            return ()
        if not usable.from_s <= now_s < usable.until_s:
            usable.find(self.alive(name, now_s), now_s)
        return usable.found

    def is_served(self, name: str, now_s: float) -> bool:
        """Whether a worker that is not suspected can take something new."""
        return any(not one.is_suspected(now_s) for one in self.of(name, now_s))

    def longest_s(self, name: str, now_s: float) -> float:
        """Returns after how many seconds all workers have reported again. 0 without workers."""
        return max((one.every_s for one in self.of(name, now_s)), default=0.0)

    def waiting_per_slot(self, name: str, now_s: float, more: int = 0) -> float:
        """Returns how many prompts or resets wait for each of the slots, if `more` come.

        0 without workers.
        """
        loads = [one.load for one in self.of(name, now_s)]
        slots = sum(one.slots for one in loads)
        free = sum(max(0, one.slots - one.busy) for one in loads)
        waiting = sum(one.waiting for one in loads) + max(0, more - free)
        return waiting / slots if slots else 0.0


class WorkerLoads(Loads[PoolLoad]):
    """What inference workers report about policies."""

    def _reported(self, report: LoadReported) -> Mapping[str, PoolLoad]:
        return {load.policy: load for load in report.pools}


class EnvironmentLoads(Loads[EnvironmentLoad]):
    """What env workers report about environments."""

    def _reported(self, report: LoadReported) -> Mapping[str, EnvironmentLoad]:
        return {load.environment: load for load in report.environments}
