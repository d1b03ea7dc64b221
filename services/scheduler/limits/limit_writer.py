"""Writes how limits are divided among the workers, as long as the scheduler is active."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

from headrace.schemas.events import Event, LimitSet, LimitShared, LoadReported
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import LIMITS, LOADS, SHARES, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.scheduler.limits.limit_division import DIVIDE_S, DividedLimits
from headrace.services.worker.limits.limits_of import all_limits, environment_limits
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import SideStart

LOOK_S = 1.0
"""Seconds between two looks for workers that are silent."""


def limit_topics(recipe: Recipe, topics: Topics) -> Mapping[Partition, SideStart]:
    """Returns what the scheduler reads in addition if the recipe has limits."""
    divided, counted = all_limits(recipe), environment_limits(recipe)
    starts: dict[Partition, SideStart] = {}
    if divided:
        starts[topics.partition(SHARES)] = "first"
    if divided or counted:
        starts[topics.partition(LIMITS)] = "first"
    return starts


class LimitWriter:
    """Passes events to the division of limits, and writes what it decides."""

    def __init__(
        self, shard: ShardContext, recipe: Recipe, on_set: Callable[[LimitSet], None]
    ) -> None:
        """`on_set` gets each new value of a limit, too."""
        self._shard = shard
        self._on_set = on_set
        self._limits = DividedLimits(all_limits(recipe))
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._read = 0
        """Offset after the newest report that was read."""
        self._expected: tuple[float, int] | None = None
        """A time, and the end of the reports in the log at that time."""

    def on_event(self, delivery: Delivery[Event]) -> None:
        """Takes a report, a division, or the new value of a limit. Ignores all others."""
        event = delivery.event
        if isinstance(event, LoadReported):
            self._read = delivery.offset + 1
            if (
                self._shard.caught_up
            ):  # Before that, the successor counts all leases from its begin.
                self._limits.on_report(event, self._loop.time())
        elif isinstance(event, LimitShared):
            if not self._shard.caught_up:  # Its own divisions are known already.
                self._limits.on_shared(event)
        elif isinstance(event, LimitSet):
            self._limits.on_set(event)
            self._on_set(event)
        else:
            return
        self._news.set()

    async def run(self) -> None:
        """Divides until cancelled."""
        if not self._limits:
            return
        self._limits.begin(self._loop.time())
        while True:
            self._news.clear()
            await self._look()
            if divisions := self._limits.divide(self._loop.time()):
                await self._shard.send_all(divisions)
            await asyncio.sleep(DIVIDE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _look(self) -> None:
        """Takes back the units of workers that are silent, once all reports were read."""
        if self._expected is not None and self._read >= self._expected[1]:
            self._limits.on_heard(self._expected[0])
            self._expected = None
        now_s = self._loop.time()
        if self._expected is None and self._limits.overdue(now_s):
            at = self._shard.log.topics.partition(LOADS)
            _, end = (await self._shard.log.broker.ends([at]))[at]
            self._expected = now_s, end
