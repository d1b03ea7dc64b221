"""Follows the log of a run, and yields how many inference workers it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from headrace.errors import DependencyError
from headrace.schemas.events import LoadReported, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.worker_settings import Autoscale
from headrace.schemas.topics import LOADS, POLICIES
from headrace.services.base.clock import now
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import Back, follow_events
from headrace.services.operate.autoscale.autoscaler import Autoscaler, Scaling

TICK_S = 1.0


async def follow_scaling(
    log: EventLog, recipe: Recipe, settings: Autoscale, workers: int | None = None
) -> AsyncGenerator[Scaling]:
    """Yields the wanted number each second, from what is recorded from now on.

    `workers` is the number that was started; None takes what reports first. Raises DependencyError
    if the log can't be followed.
    """
    scaler = Autoscaler(recipe, settings, now(), workers)
    following = asyncio.create_task(_follow(log, scaler), name="scaling")
    try:
        while True:
            await asyncio.wait({following}, timeout=TICK_S)
            if following.done():
                following.result()
                raise DependencyError("the log can no longer be followed")
            yield scaler.decide(now())
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow(log: EventLog, scaler: Autoscaler) -> None:
    starts = {log.topics.partition(topic): Back(0) for topic in (POLICIES, LOADS)}
    async with aclosing(follow_events(log, dict(starts))) as items:
        async for item in items:
            if not isinstance(item, Delivery):
                continue
            if isinstance(item.event, PolicyPublished):
                scaler.on_published(item.event, item.recorded_at)
            elif isinstance(item.event, LoadReported):
                scaler.on_report(item.event, now())
