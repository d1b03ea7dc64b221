"""The slots of one environment of the recipe: how many instances a worker has open at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import Gauge

from headrace.errors import HeadraceError
from headrace.services.base.clock import now

logger = logging.getLogger(__name__)

SLOTS = Gauge("headrace_environment_slots", "Environments that may be open.", ["environment"])
BUSY = Gauge("headrace_environment_slots_busy", "Slots in use.", ["environment"])
WAITING = Gauge(
    "headrace_environments_waiting", "Environments that wait for a slot.", ["environment"]
)
STUCK = Gauge(
    "headrace_environment_slots_stuck",
    "Slots of calls that have not returned although they were cancelled.",
    ["environment"],
)

STUCK_S = 60.0
"""A slot is stuck if it is in use so many seconds after its user had to end."""
NEWEST = 32
"""Means are over about so many of the newest measurements."""


class EnvironmentSlots:
    """Limits the instances that are open at once, and measures how long they take."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.busy = 0
        """Slots in use."""
        self.waiting = 0
        """How many wait for a slot."""
        self.run_s = Mean()
        """Mean seconds of a reset, a step or a score."""
        self.open_s = Mean()
        """Mean seconds that a slot was in use."""
        self._free = asyncio.Semaphore(most)
        self._users: set[Callable[[], float]] = set()
        """When each user of a slot has to end, in seconds since the epoch."""
        self._seen_stuck = 0

    def export(self, environment: str) -> None:
        """Lets each scrape of the metrics read these slots. `environment` is the recipe's key."""
        SLOTS.labels(environment).set(self.most)
        BUSY.labels(environment).set_function(lambda: self.busy)
        WAITING.labels(environment).set_function(lambda: self.waiting)
        STUCK.labels(environment).set(0)  # `require_free` sets it, because it needs the loop.

    def stuck(self) -> int:
        """Returns how many slots are stuck."""
        late = now() - STUCK_S
        return sum(ends_at() < late for ends_at in self._users)

    def require_free(self, environment: str) -> None:
        """Raises HeadraceError if half of the slots or more are stuck. Logs each that gets stuck.

        Nothing in this process can free them. `environment` is the recipe's key.
        """
        stuck, seen = self.stuck(), self._seen_stuck
        self._seen_stuck = stuck
        STUCK.labels(environment).set(stuck)
        what = (
            f"{stuck} of {self.most} slots of environments.{environment} are stuck: its code did "
            f"not return within {STUCK_S:g} s after it was cancelled"
        )
        advice = (
            "Let the code pass asyncio.CancelledError on, and give its calls a time limit of their "
            "own"
        )
        if 2 * stuck >= self.most:
            raise HeadraceError(
                f"{what}. This worker ends, so that another process takes over its environments. "
                f"{advice}"
            )
        if stuck > seen:
            logger.error("%s. The worker ends when half of them are. %s", what, advice)

    @asynccontextmanager
    async def slot(self, ends_at: Callable[[], float]) -> AsyncIterator[None]:
        """Waits for a slot, and has it until the context ends.

        `ends_at` returns when that has to be, in seconds since the epoch.
        """
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        self._users.add(ends_at)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.busy -= 1
            self._users.discard(ends_at)
            self.open_s.add(loop.time() - began)
            self._free.release()


class Mean:
    """The mean of about the newest numbers; 0 before the first one."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, number: float) -> None:
        """Takes a number into the mean."""
        self._count = min(self._count + 1, NEWEST)
        # The wall clock may have been set back.
        self.value += (max(0.0, number) - self.value) / self._count
