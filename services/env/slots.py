"""The slots of one environment of the recipe: how many instances a worker has open at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import Gauge

SLOTS = Gauge("headrace_environment_slots", "Environments that may be open.", ["environment"])
BUSY = Gauge("headrace_environment_slots_busy", "Slots in use.", ["environment"])
WAITING = Gauge(
    "headrace_environments_waiting", "Environments that wait for a slot.", ["environment"]
)

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

    def export(self, environment: str) -> None:
        """Lets each scrape of the metrics read these slots. `environment` is the recipe's key."""
        SLOTS.labels(environment).set(self.most)
        BUSY.labels(environment).set_function(lambda: self.busy)
        WAITING.labels(environment).set_function(lambda: self.waiting)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Waits for a slot, and has it until the context ends."""
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.busy += 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.busy -= 1
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
