"""The statistics of a million items: memory, the cost of a group, and of a search through them."""

from __future__ import annotations

import time
from typing import Any

import psutil

from headrace.schemas.events import GroupClosed
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.tasks.curation.choose_items import Chosen, Curation, Unchosen
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from tests.bench.report import Figure

ITEMS = 1_000_000
SOLVED: dict[str, Any] = {"mean": 1.0, "deviation": 0.0, "rewarded": 8, "passed": 8}
_GROUP = GroupClosed(task=0, policy="default", item_id="", verdict="dropped", **SOLVED)


def a_group(task: int) -> GroupClosed:
    """Returns the group of a task with an item of its own, which was solved."""
    return _GROUP.model_copy(update={"task": task, "item_id": str(task)})


async def item_statistics(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Folds one group of each item, all solved, and searches for one that is worth a task."""
    count = round(ITEMS * scale)
    process, statistics = psutil.Process(), ItemStatistics("default")
    before, begun = process.memory_info().rss, time.perf_counter()
    for task in range(count):
        statistics.on_group(a_group(task), task)
        if task % 1024 == 1023:
            statistics.take_changed()
    fold_s, used = time.perf_counter() - begun, process.memory_info().rss - before
    found, search_s, longest_s = _search(statistics, count)
    assert found is None, "all items are solved"
    return [
        Figure(f"memory of {count:,} items", f"{used / 2**20:.0f} MiB", "1,024 MiB"),
        Figure("a group, with its event", f"{fold_s / count * 1e6:.0f} µs"),
        Figure("a pass in which all is skipped", f"{search_s:.1f} s", note="between other work"),
        Figure("the longest time without other work", f"{longest_s * 1e3:.1f} ms"),
    ]


def _search(statistics: ItemStatistics, count: int) -> tuple[Chosen | None, float, float]:
    """Returns what was found, the seconds of a whole search, and those of its longest step."""
    tasks = {"options": {"items": count}, "curators": ["greso", "pass_rate"]}
    tree = {"name": "bench", "tasks": tasks, "policies": {"default": {"model": "tiny-llama"}}}
    search = Curation(Recipe.model_validate(tree), statistics).search()
    begun = step = time.perf_counter()
    longest_s, found = 0.0, None
    for one in search:
        now = time.perf_counter()
        longest_s, step = max(longest_s, now - step), now
        found = one
    assert isinstance(found, Chosen | Unchosen)
    return found if isinstance(found, Chosen) else None, time.perf_counter() - begun, longest_s
