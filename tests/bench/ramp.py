"""A ramp of live episodes: what those that sleep cost the others, in latency and in memory.

Episodes that wait for their environment are added step by step. At each step a constant load of
other episodes plays four turns each, and the agent measures each turn. At the end the agent worker
and the env worker are killed, and other episodes are timed until the workers' successors end them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from statistics import quantiles
from typing import Any

import psutil

from headrace.schemas.events import EnvironmentUse
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ACTIONS, RESULTS
from headrace.services.log.event_log import Delivery
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.bench.cpu import CpuWatch
from tests.bench.deployment import Deployment, deployed
from tests.bench.episodes import (
    SERVICES,
    TURNS,
    WARM_UP,
    Driver,
    null_recipe,
    turn_milliseconds,
)
from tests.bench.report import Figure

STEPS = (1, 10, 100, 1_000, 10_000)
MOST = 100_000
"""Live episodes of the last step, in which they only sleep."""
ACTING, LIVE = 300, 4
"""Episodes that act at each step, and how many of them at the same time."""
SUBMITTED_AT_ONCE = 500
STEP_S = 1_200.0
"""Longest that a step may take."""
SLEEP_S = 86_400
MEASURED = ("agent", "env", "scheduler")


async def ramp(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Latency and memory from 1 to 10,000 live episodes, and with ten times as many."""
    return await _ramp(cluster, scale, (*STEPS, MOST))


async def short_ramp(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """The same up to 10,000."""
    return await _ramp(cluster, scale, STEPS)


async def _ramp(cluster: ClusterConfig, scale: float, steps: tuple[int, ...]) -> list[Figure]:
    steps = tuple(sorted({max(1, int(step * scale)) for step in steps}))
    figures: list[Figure] = []
    async with deployed(cluster, _recipe(steps[-1] + WARM_UP)) as deployment:
        await deployment.publish_initial()
        driver, sleepers = Driver(deployment), _Sleepers(deployment)
        async with deployment.serving(*SERVICES), deployment.following(RESULTS) as results:
            await driver.run(results, WARM_UP, 16)
            watch = CpuWatch(cluster.state)
            before = _memory(watch)
            for step in steps:
                async with asyncio.timeout(STEP_S):
                    began = time.perf_counter()
                    await sleepers.until(step)
                    seconds = time.perf_counter() - began
                    figures += await _measure(deployment, driver, results, step, seconds)
                    figures.append(_memory_figure(step, before, _memory(watch)))
                    for figure in figures[-2:]:
                        print(figure, flush=True)
            figures.append(await _take_over(watch, driver, results, steps[-1]))
            print(figures[-1], flush=True)
    return figures


def _recipe(live: int) -> Recipe:
    """The null recipe, and an environment that sleeps."""
    tree = null_recipe({"turns": TURNS}, live=live, turns=TURNS, seconds=120).model_dump(
        mode="json", exclude_unset=True
    )
    options = {"delay_ms": SLEEP_S * 1000}
    tree["environments"]["asleep"] = {"slots": live, "options": options}
    return Recipe.model_validate(tree)


class _Sleepers:
    """Episodes whose environment does not answer."""

    def __init__(self, deployment: Deployment) -> None:
        self._log = deployment.log
        self._maker = TaskMaker(deployment.recipe, "bench-asleep")
        self._count = 0

    async def until(self, count: int) -> None:
        """Submits tasks until so many sleep, and waits until their environments are asked."""
        before = await self._asked()
        more = count - self._count
        while self._count < count:
            names = range(self._count, min(count, self._count + SUBMITTED_AT_ONCE))
            await asyncio.gather(*(self._submit(str(name)) for name in names))
            self._count = names.stop
        while await self._asked() < before + more:
            await asyncio.sleep(0.2)

    async def _submit(self, name: str) -> None:
        task = self._maker.make(Item(name), name)
        use = EnvironmentUse(use="asleep")
        changes = {"environment": use, "deadline_s": SLEEP_S}
        await self._log.send(task.model_copy(update=changes))

    async def _asked(self) -> int:
        """How many actions are in the log. Nothing else acts meanwhile."""
        ends = await self._log.broker.ends(self._log.topics.partitions_of(ACTIONS))
        return sum(end for _, end in ends.values())


async def _measure(
    deployment: Deployment,
    driver: Driver,
    results: AsyncIterator[Delivery[Any]],
    live: int,
    seconds: float,
) -> list[Figure]:
    """The latency of a turn of the episodes that act."""
    _, numbers = await driver.run(results, ACTING, LIVE)
    whole, _ = await turn_milliseconds(deployment, set(numbers))
    found = quantiles(whole, n=20)
    return [
        Figure(
            f"added latency a turn, {live:,} live that sleep",
            f"p50 {found[9]:.2f} ms, p95 {found[18]:.2f} ms",
            note=f"{len(whole)} turns of {ACTING} episodes, {LIVE} at a time; "
            f"the step took {seconds:.0f} s",
        )
    ]


def _memory(watch: CpuWatch) -> dict[str, int]:
    """Resident bytes of the services."""
    processes = watch.processes()
    return {service: processes[service].memory_info().rss for service in MEASURED}


def _memory_figure(live: int, before: dict[str, int], now: dict[str, int]) -> Figure:
    whole = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in now.items())
    each = ", ".join(f"{name} {(now[name] - before[name]) / live / 1024:.1f}" for name in now)
    return Figure(f"memory, {live:,} live that sleep", whole, note=f"KiB an episode: {each}")


async def _take_over(
    watch: CpuWatch, driver: Driver, results: AsyncIterator[Delivery[Any]], live: int
) -> Figure:
    """Kills the agent worker and the env worker. Seconds until other episodes have ended."""
    for service in ("agent", "env"):
        process: psutil.Process = watch.processes()[service]
        process.kill()
    async with asyncio.timeout(STEP_S):
        seconds, _ = await driver.run(results, 16, 16)
    return Figure(
        f"take-over of {live:,} live episodes",
        f"{seconds:.1f} s",
        "60 s",
        note="from kill -9 of the agent and the env worker to the end of 16 new episodes",
    )
