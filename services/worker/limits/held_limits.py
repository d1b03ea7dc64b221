"""What one worker may hold of the limits that it shares with others. Pure: it has no clock.

A worker holds units within its newest share, and only under its lease. The lease ends LEASE_S after
the worker sent the last report that was delivered. The scheduler hears of a report later than it
was sent, and waits for longer, before it gives the units of a silent worker to another one. So
nothing stops if the scheduler is away, and a worker that was paused uses only what is still its
own.

A lease that has ended never comes back. The next report begins another lease, under which the
worker has no share until the scheduler has answered it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from headrace.schemas.events import LimitShared, LimitUse
from headrace.services.worker.limits.limits_of import LEASE_S, Limit


@dataclass(eq=False)
class _Held:
    """One limit."""

    period_s: float
    units: int = 0
    """The worker's share."""
    most: int = 1
    """The limit's units."""
    number: int = -1
    running: int = 0
    """Units of calls that have not ended, or have not begun."""
    cooling: deque[float] = field(default_factory=deque)
    """When each of the other units in use is free again."""

    def held(self, now_s: float) -> int:
        """Returns how many units are in use."""
        while self.cooling and self.cooling[0] <= now_s:
            self.cooling.popleft()
        return self.running + len(self.cooling)


class HeldLimits:
    """The shares of one worker. Times are in seconds of a clock that is never set."""

    def __init__(self, worker: str, limits: Mapping[str, Limit], lease: int) -> None:
        """`lease` is the time in milliseconds since the epoch, and so differs from the leases of
        earlier processes of the same name."""
        self._worker = worker
        self._held = {name: _Held(limit.period_s) for name, limit in limits.items()}
        self.lease = lease
        self.lease_until = -inf
        """When the lease ends. It has not begun if this is minus infinity."""

    def __contains__(self, limit: str) -> bool:
        return limit in self._held

    def is_over(self, now_s: float) -> bool:
        """Whether the worker may use nothing now. If its lease has ended, another one begins."""
        if now_s < self.lease_until:
            return False
        if self.lease_until != -inf:
            self.lease += 1
            self.lease_until = -inf
            for held in self._held.values():
                held.units = 0
        return True

    def on_shared(self, event: LimitShared) -> bool:
        """Takes a division of a limit. Returns whether the worker's share has changed."""
        held = self._held.get(event.limit)
        if held is None or event.number <= held.number:
            return False
        held.number, held.period_s = event.number, event.period_ms / 1000
        held.most = event.units
        own = (share for share in event.shares if share.worker == self._worker)
        units = next((share.units for share in own if share.lease == self.lease), 0)
        changed, held.units = units != held.units, units
        return changed

    def on_delivered(self, lease: int, sent_s: float, now_s: float) -> None:
        """Notes that a report of this lease, which was sent at `sent_s`, is in the log."""
        self.is_over(now_s)
        if lease == self.lease:
            self.lease_until = max(self.lease_until, sent_s + LEASE_S)

    def uses(self, now_s: float, waiting: Mapping[str, int]) -> tuple[LimitUse, ...]:
        """Returns what a report says. `waiting` has the calls that wait, by limit."""
        self.is_over(now_s)
        uses = []
        for name, held in self._held.items():
            count = held.held(now_s)
            wanted = min(count + waiting.get(name, 0), 2**31 - 1)
            uses.append(LimitUse(limit=name, number=held.number, held=count, wanted=wanted))
        return tuple(uses)

    def share(self, limits: Iterable[str]) -> float:
        """Returns how many calls may be in flight under all these limits. Infinite without one.

        It is 0 only if a limit is 0: a worker that has no unit now will get one.
        """
        found = [self._held[name] for name in limits]
        if not all(one.most for one in found):
            return 0
        if not all(one.units for one in found):
            return 1
        return min((one.units for one in found if not one.period_s), default=inf)

    def any_free(self, limits: Collection[str], now_s: float) -> bool:
        """Whether a call may begin that needs a unit of each of these limits."""
        if limits and self.is_over(now_s):
            return False
        found = (self._held[name] for name in limits)
        return all(one.held(now_s) < one.units for one in found)

    def take(self, limits: Collection[str], now_s: float) -> Permit:
        """Takes a unit of each limit. `any_free` must have said that there is one."""
        assert self.any_free(limits, now_s)
        found = [self._held[name] for name in limits]
        for one in found:
            one.running += 1
        return Permit(found)


class Permit:
    """One unit of each limit that a call needs. Both methods may be called more than once."""

    def __init__(self, held: list[_Held]) -> None:
        self._ending = [one for one in held if not one.period_s]
        """The limits whose units are free when the call ends."""
        self._begun = [one for one in held if one.period_s]

    def begun(self, now_s: float) -> float | None:
        """Notes that the call had begun by `now_s`. From then on the periods count.

        Returns when the last of its units is free again, None if no limit has a period.
        """
        for one in self._begun:
            one.running -= 1
            one.cooling.append(now_s + one.period_s)
        free = max((one.cooling[-1] for one in self._begun), default=None)
        self._begun = []
        return free

    def release(self) -> None:
        """Notes that the call has ended, or will not begin."""
        for one in (*self._ending, *self._begun):
            one.running -= 1
        self._ending, self._begun = [], []
