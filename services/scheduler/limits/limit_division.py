"""Divides a limit among the workers. Pure: the caller has the clock, which is never set.

The sum of what all workers may hold is never more than the limit:

- A share that grows takes only units that are not reserved.
- A share that shrinks leaves its units reserved until the worker has reported that it obeys this
  division, and that it holds no more. So calls in flight end in peace.
- If a worker is silent, its units stay reserved until its lease has ended for certain: LEASE_S and
  MARGIN_S after its last report was read, and then for the limit's period. That counts only if all
  has been read that was in the log by then, because a scheduler that was paused must not take its
  own silence for that of the workers.

Each division has all that a successor needs: the shares, and what is reserved. A successor counts
all leases from when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from headrace.schemas.events import LimitSet, LimitShare, LimitShared, LimitUse, LoadReported
from headrace.services.scheduler.limits.fair_shares import Wish, fair_shares
from headrace.services.worker.limits.limits_of import LEASE_S, Limit, new_value

MARGIN_S = 2.0
"""Seconds that the scheduler waits for longer than a lease lasts: clocks differ a little in speed,
and a call in flight takes a moment to end."""
DIVIDE_S = 0.2
"""Least seconds between two divisions of a limit."""
PEAK_S = 3.0
"""A worker gives units away if it has wanted fewer for so many seconds."""
MOST_HOLDERS = 10_000
"""Most leases that are remembered for a limit. Further workers have no share."""

Holder = tuple[str, int]
"""A worker and its lease."""


@dataclass(eq=False)
class _Holding:
    """What a worker may hold under one lease."""

    heard_s: float
    """When its last report was read."""
    units: int = 0
    reserved: int = 0
    """The most that it may hold, `units` included."""
    changed: int = 0
    """Number of the division that changed its share last."""
    since: float = 0.0
    """Since when it has units, or has none."""
    leaving: bool = False
    wanted: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and what was wanted then, descending: the first one is the peak."""

    def want(self, wanted: int, now_s: float) -> None:
        """Notes what the worker wants."""
        while self.wanted and self.wanted[-1][1] <= wanted:
            self.wanted.pop()
        self.wanted.append((now_s, wanted))
        while self.wanted[0][0] <= now_s - PEAK_S and len(self.wanted) > 1:
            self.wanted.popleft()

    def share(self, units: int, number: int, now_s: float) -> None:
        """Changes the share, in the division of this number."""
        if (units > 0) != (self.units > 0):
            self.since = now_s
        self.units, self.changed = units, number
        self.reserved = max(self.reserved, units)


class DividedLimit:
    """One limit and its holders."""

    def __init__(self, name: str, limit: Limit) -> None:
        self.name = name
        self._limit = limit
        self._written: Limit | None = None
        """The limit as the newest division has it."""
        self._number = -1
        self._holders: dict[Holder, _Holding] = {}
        self._next_s = 0.0
        """When the limit may be divided again."""

    def on_set(self, event: LimitSet) -> None:
        """Takes a new value."""
        self._limit = new_value(self._limit, event)

    def on_shared(self, event: LimitShared) -> None:
        """Takes a division of an earlier scheduler."""
        if event.number > self._number:
            self._number = event.number
            self._written = Limit(event.units, event.period_ms)
            self._holders = {
                (share.worker, share.lease): _Holding(
                    0.0, share.units, share.reserved, event.number
                )
                for share in event.shares
            }

    def begin(self, now_s: float) -> None:
        """Begins to decide. All earlier divisions were read, and any lease may be a new one."""
        for held in self._holders.values():
            held.heard_s = held.since = now_s
            held.want(held.units, now_s)

    def on_report(self, report: LoadReported, use: LimitUse, now_s: float) -> None:
        """Takes a worker's report, which was read at `now_s`."""
        holder = report.worker, report.lease
        held = self._holders.get(holder)
        if held is None:
            if len(self._holders) >= MOST_HOLDERS:
                return
            held = self._holders[holder] = _Holding(now_s, since=now_s, changed=self._number)
        held.heard_s = now_s
        # A worker that drains answers what it can't hand over.
        held.leaving = report.leaving and not use.wanted
        held.want(use.wanted, now_s)
        if use.number >= held.changed:
            held.reserved = max(held.units, use.held)

    def overdue(self, now_s: float) -> bool:
        """Whether a worker is silent for so long that its units could be taken back."""
        return any(now_s >= self._ends_s(held) for held in self._holders.values())

    def on_heard(self, now_s: float) -> None:
        """Notes that all reports were read that were in the log at `now_s`."""
        period_s = max(self._limit.period_s, self._written.period_s if self._written else 0.0)
        for holder, held in list(self._holders.items()):
            if now_s >= self._ends_s(held):
                held.leaving = True
                if now_s >= self._ends_s(held) + period_s:
                    del self._holders[holder]

    @property
    def units(self) -> int:
        """The limit's units."""
        return self._limit.units

    def without(self) -> set[Holder]:
        """Returns the holders that have no unit."""
        return {holder for holder, held in self._holders.items() if not held.units}

    def divide(self, now_s: float, unable: Collection[Holder] = ()) -> LimitShared | None:
        """Returns a new division if one is needed. The caller must write it.

        `unable` are holders that could not use a unit, because they lack one of another limit.
        """
        number = self._number + 1
        if now_s < self._next_s or not self._redivide(number, now_s, unable):
            return None
        self._next_s = now_s + DIVIDE_S
        self._number, self._written = number, self._limit
        return LimitShared(
            limit=self.name,
            number=number,
            units=self._limit.units,
            period_ms=self._limit.period_ms,
            shares=tuple(
                LimitShare(worker=worker, lease=lease, units=held.units, reserved=held.reserved)
                for (worker, lease), held in self._holders.items()
                if held.reserved
            ),
        )

    def _ends_s(self, held: _Holding) -> float:
        return held.heard_s + LEASE_S + MARGIN_S

    def _redivide(self, number: int, now_s: float, unable: Collection[Holder]) -> bool:
        """Changes the shares. Returns whether anything has changed."""
        before = [held.units for held in self._holders.values()]
        wishes: dict[_Holding, Wish] = {}
        for holder, held in self._holders.items():
            if not held.leaving:
                wanted = 0 if holder in unable else held.wanted[0][1]
                wishes[held] = Wish(held.units, wanted, held.since)
            elif held.units:
                held.share(0, number, now_s)
        fair = fair_shares(self._limit.units, list(wishes.values()), now_s)
        targets = dict(zip(wishes, fair, strict=True))
        short = [one for one in wishes if one.units < min(targets[one], max(1, one.wanted[-1][1]))]
        self._shrink(targets, short, number, now_s)
        self._grow(targets, short, number, now_s)
        changed = before != [held.units for held in self._holders.values()]
        return changed or (self._written is not None and self._written != self._limit)

    def _shrink(
        self, targets: dict[_Holding, int], short: list[_Holding], number: int, now_s: float
    ) -> None:
        """Takes as many units as are short, from those that have most beyond their fair share."""
        coming = self._limit.units - sum(held.units for held in self._holders.values())
        lacking = sum(targets[one] - one.units for one in short) - coming
        for one in sorted(targets, key=lambda one: targets[one] - one.units):
            fewer = min(one.units - targets[one], lacking)
            if fewer <= 0:
                break
            one.share(one.units - fewer, number, now_s)
            lacking -= fewer

    def _grow(
        self, targets: dict[_Holding, int], short: list[_Holding], number: int, now_s: float
    ) -> None:
        """Gives units that are not reserved to those that are short.

        Those with the fewest go first, and among these who has waited for longest.
        """
        free = self._limit.units - sum(held.reserved for held in self._holders.values())
        for one in sorted(short, key=lambda one: (one.units, one.since)):
            units = min(targets[one], one.reserved + max(0, free))
            if units > one.units:
                free -= max(0, units - one.reserved)
                one.share(units, number, now_s)


class DividedLimits:
    """All limits of a run."""

    def __init__(self, limits: dict[str, Limit]) -> None:
        self._limits = {name: DividedLimit(name, limit) for name, limit in limits.items()}

    def __bool__(self) -> bool:
        """Whether there are limits."""
        return bool(self._limits)

    def on_set(self, event: LimitSet) -> None:
        """Takes a limit's new value."""
        if event.limit in self._limits:
            self._limits[event.limit].on_set(event)

    def on_shared(self, event: LimitShared) -> None:
        """Takes a division of an earlier scheduler."""
        if event.limit in self._limits:
            self._limits[event.limit].on_shared(event)

    def begin(self, now_s: float) -> None:
        """Begins to decide."""
        for limit in self._limits.values():
            limit.begin(now_s)

    def on_report(self, report: LoadReported, now_s: float) -> None:
        """Takes a worker's report, which was read at `now_s`."""
        for use in report.limits:
            if use.limit in self._limits:
                self._limits[use.limit].on_report(report, use, now_s)

    def overdue(self, now_s: float) -> bool:
        """Whether a worker is silent for so long that its units could be taken back."""
        return any(limit.overdue(now_s) for limit in self._limits.values())

    def on_heard(self, now_s: float) -> None:
        """Notes that all reports were read that were in the log at `now_s`."""
        for limit in self._limits.values():
            limit.on_heard(now_s)

    def divide(self, now_s: float) -> list[LimitShared]:
        """Returns the divisions to write now.

        A call may need units of several limits, whose names differ in their last part. They go to
        the same workers: a worker without a unit of the scarcest one wants nothing of the others.
        """
        divisions, unable, kind = [], set[Holder](), ""
        for name, limit in sorted(self._limits.items(), key=_scarcest_first):
            if name.rpartition(".")[0] != kind:
                unable, kind = set(), name.rpartition(".")[0]
            divisions.append(limit.divide(now_s, unable))
            unable |= limit.without()
        return [one for one in divisions if one is not None]


def _scarcest_first(item: tuple[str, DividedLimit]) -> tuple[str, int, str]:
    name, limit = item
    return name.rpartition(".")[0], limit.units, name
