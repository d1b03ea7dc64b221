"""How soon the job that keeps the statistics of a million items is back after `kill -9`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import psutil

from headrace.schemas.events import Event, GroupClosed
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ITEMS
from headrace.services.log.event_log import Delivery
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from headrace.services.tasks.curation.read_items import read_items
from headrace.stream_jobs.measure_items import SERVICE
from tests.bench.cpu import CpuWatch
from tests.bench.deployment import Deployment, deployed
from tests.bench.items import ITEMS as COUNT
from tests.bench.items import a_group
from tests.bench.report import Figure, rate

POLICY = "default"
SENT_AT_ONCE = 8_192
BOUND_S = 1_800.0
RECIPE: dict[str, Any] = {"name": "bench-items", "policies": {POLICY: {"model": "tiny-llama"}}}


async def item_recovery(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Counts one group of each item, kills the job twice, and compares with an undisturbed fold.

    The first time the job has counted all groups before, the second time it has missed some. While
    these are sent the job is suspended, and its sessions at the broker may expire before the kill.
    Then its successor does not wait for them, so the two times may not compare.
    """
    count = round(COUNT * scale)
    undisturbed = ItemStatistics(POLICY)
    async with (
        deployed(cluster, Recipe.model_validate(RECIPE)) as deployment,
        deployment.serving(SERVICE),
        deployment.following(ITEMS, POLICY) as items,
        asyncio.timeout(BOUND_S),
    ):
        begun = time.perf_counter()
        await _send(deployment, undisturbed, range(count))
        await _wait_for(items, str(count - 1))
        counted = Figure("items counted and written", rate(count, time.perf_counter() - begun))
        idle = await _kill(deployment, undisturbed, items, range(count, count + 1))
        late = range(count + 1, count + 1 + count // 10)
        behind = await _kill(deployment, undisturbed, items, late)
        used = _process(deployment).memory_info().rss
        recorded = await read_items(deployment.log, POLICY)
    if differ := [one for one in undisturbed if recorded.get(one) != undisturbed.get(one)]:
        raise RuntimeError(f"{len(differ)} items differ from an undisturbed fold, as {differ[0]}")
    note = "from kill -9 to the item of the last group that was sent before"
    return [
        counted,
        Figure(f"recovery with {count:,} items", f"{idle:.1f} s", note=note),
        Figure(f"… that missed {len(late):,} groups", f"{behind:.1f} s", note=note),
        Figure("memory of the job", f"{used / 2**20:,.0f} MiB", note="its whole process"),
        Figure("items as without a kill", f"{len(recorded):,}", f"{len(undisturbed):,}"),
    ]


async def _send(deployment: Deployment, undisturbed: ItemStatistics, tasks: Iterable[int]) -> None:
    """Sends a group of a new item for each task, and adds it to the undisturbed fold."""
    waiting: list[GroupClosed] = []

    async def flush() -> None:
        await asyncio.gather(*map(deployment.log.send, waiting))
        waiting.clear()

    for task in tasks:
        group = a_group(task)
        undisturbed.on_group(group, task)
        waiting.append(group)
        if len(waiting) == SENT_AT_ONCE:
            await flush()
    await flush()


async def _kill(
    deployment: Deployment,
    undisturbed: ItemStatistics,
    items: AsyncIterator[Delivery[Event]],
    missed: range,
) -> float:
    """Kills the job. Seconds until its successor has written the last of the groups it missed."""
    process = _process(deployment)
    process.suspend()
    try:
        await _send(deployment, undisturbed, missed)
    finally:  # a process that stands still would stay
        begun = time.perf_counter()
        process.kill()
    await _wait_for(items, str(missed[-1]))
    return time.perf_counter() - begun


async def _wait_for(items: AsyncIterator[Delivery[Event]], item_id: str) -> None:
    async for one in items:
        if one.event.item_id == item_id:  # type: ignore[attr-defined]
            return


def _process(deployment: Deployment) -> psutil.Process:
    return CpuWatch(deployment.cluster.state).processes()[SERVICE]
