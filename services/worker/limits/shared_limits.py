"""The limits that a worker process shares: follows their divisions, and gives permits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, asynccontextmanager

from headrace.schemas.events import LimitShared, LimitUse
from headrace.schemas.topics import SHARES
from headrace.services.base.clock import now_ms
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import follow_events
from headrace.services.worker.limits.held_limits import HeldLimits, Permit
from headrace.services.worker.limits.limits_of import Limit

LATER_S = 0.001
"""The loop may call a timer early, by the resolution of its clock."""


class LeaseOver(Exception):
    """The worker could not report for some seconds, so its calls end. They are repeated."""


class SharedLimits:
    """The limits of one worker process. Make it in the event loop."""

    def __init__(self, worker: str, limits: Mapping[str, Limit]) -> None:
        self._loop = asyncio.get_running_loop()
        self._held = HeldLimits(worker, limits, now_ms())
        self._empty = not limits
        self._bounds: set[asyncio.Timeout] = set()
        """The time limits of the calls in flight: the end of the lease."""
        self._listeners: dict[Callable[[], None], None] = {}
        """In the order in which they are called. Whoever has taken a permit comes last."""
        self.report_soon: Callable[[], None] = lambda: None
        """Called if the scheduler should hear from this worker soon."""

    def listen(self, freed: Callable[[], None]) -> None:
        """Adds a function that is called whenever a permit may be free."""
        self._listeners[freed] = None

    def move_last(self, freed: Callable[[], None]) -> None:
        """Calls a listener after all others from now on, so that nobody takes every permit."""
        if freed in self._listeners:
            del self._listeners[freed]
            self._listeners[freed] = None

    async def run(self, log: EventLog) -> None:
        """Follows the divisions of the limits until cancelled."""
        if self._empty:
            await asyncio.Event().wait()
        # The newest division of a limit is the last one, and the topic is compacted.
        events = follow_events(log, {log.topics.partition(SHARES): "first"})
        async with aclosing(events):
            async for item in events:
                if isinstance(item, Delivery) and isinstance(item.event, LimitShared):
                    if self._held.on_shared(item.event):
                        self.report_soon()
                    self.notify()

    @property
    def lease(self) -> int:
        """The number of the lease that a report belongs to. Read it after `uses`."""
        return self._held.lease

    def uses(self, waiting: Mapping[str, int]) -> tuple[LimitUse, ...]:
        """Returns what a report of now says. `waiting` has the calls that wait, by limit."""
        return self._held.uses(self._loop.time(), waiting)

    def on_delivered(self, lease: int, sent_s: float) -> None:
        """Notes that a report, which was sent at `sent_s` of the loop's clock, is in the log."""
        self._held.on_delivered(lease, sent_s, self._loop.time())
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(self._held.lease_until)
        self.notify()

    def permits(self, limits: Collection[str]) -> Permits:
        """Returns what gives permits for calls that need a unit of each of these limits."""
        return Permits(self, self._held, limits)

    @asynccontextmanager
    async def within_lease(self) -> AsyncIterator[None]:
        """Ends the block with LeaseOver when the lease ends."""
        if self._held.is_over(self._loop.time()):
            raise LeaseOver
        try:
            async with asyncio.timeout_at(self._held.lease_until) as bound:
                self._bounds.add(bound)
                try:
                    yield
                finally:
                    self._bounds.discard(bound)
        except TimeoutError:
            if bound.expired():
                raise LeaseOver from None
            raise

    def notify_at(self, when_s: float) -> None:
        """Calls the listeners just after a time of the loop's clock."""
        self._loop.call_at(when_s + LATER_S, self.notify)

    def notify(self) -> None:
        """Calls the listeners."""
        for freed in tuple(self._listeners):
            freed()


class Permits:
    """Gives permits for the calls of one kind. Without limits every call gets one at once."""

    def __init__(self, shared: SharedLimits, held: HeldLimits, limits: Collection[str]) -> None:
        self._shared = shared
        self._held = held
        self.limits = tuple(limits)
        self.waiting = 0
        """Calls that wait for a permit, or for something else."""
        self._loop = asyncio.get_running_loop()

    def listen(self, freed: Callable[[], None]) -> None:
        """Adds a function that is called whenever a permit may be free."""
        if self.limits:
            self._shared.listen(freed)

    def share(self) -> float:
        """Returns how many calls this worker may have in flight. Infinite without limits."""
        return self._held.share(self.limits)

    def any_free(self) -> bool:
        """Whether a call may begin now."""
        return self._held.any_free(self.limits, self._loop.time())

    def lacks(self) -> None:
        """Notes that a call begins to wait because no permit is free."""
        if self.waiting <= 1:
            self._shared.report_soon()

    def take(self, freed: Callable[[], None]) -> Call:
        """Takes a permit for whom `freed` informs.

        `any_free` must have been true in this step of the loop.
        """
        self._shared.move_last(freed)
        return Call(self, self._held.take(self.limits, self._loop.time()), self._shared)


class Call:
    """A call that has a permit. Its methods may be called more than once."""

    def __init__(self, permits: Permits, permit: Permit, shared: SharedLimits) -> None:
        self._permits = permits
        self._permit = permit
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._begun = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Surrounds the call itself. Raises LeaseOver if the worker must not go on with it."""
        if not self._permits.limits:
            yield
            return
        async with self._shared.within_lease():
            self._begun = True
            # The call begins in this step of the loop, so its period counts from the next one.
            self._loop.call_soon(self._count)
            yield

    def release(self) -> None:
        """Gives the permit back. The call has ended, or will not begin."""
        if self._permits.limits:
            self._count()
            self._permit.release()
            self._shared.notify()

    def _count(self) -> None:
        if self._begun:
            self._begun = False
            if (free_s := self._permit.begun(self._loop.time())) is not None:
                self._shared.notify_at(free_s)
