"""What the batches of a run are made of, and what its curators and mixture chose: from its log."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing

from headrace.schemas.events import BatchAssembled, Event, GroupClosed, TaskSubmitted
from headrace.schemas.topics import BATCHES, GROUPS, TASKS
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.verify import check_namespace

POLICY = "default"
SETTLED = 10
"""Batches until the pool has enough groups to replay."""


def read_composition(cluster: ClusterConfig) -> dict[str, float]:
    """Reads a run that has ended. Returns the shares and counts of `composition`, and how many
    `violations` of the promises of the log were found, such as a choice that does not follow from
    it.
    """
    return asyncio.run(_read(cluster))


async def _read(cluster: ClusterConfig) -> dict[str, float]:
    report = await check_namespace(cluster)
    async with open_namespace(cluster, "experiment") as (log, _):
        topics = log.topics
        partitions = [
            *topics.partitions_of(TASKS),
            *topics.partitions_of(GROUPS, POLICY),
            *topics.partitions_of(BATCHES, POLICY),
        ]
        async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
            events = [one.event async for one in deliveries]
    return {**composition(events), "violations": len(report.violations)}


def composition(events: Iterable[Event]) -> dict[str, float]:
    """Returns what a run's tasks, groups and batches show.

    - `batches`, and the share of them that are `full`: none is smaller than the largest. The last
      one does not count, because the run ends there.
    - `replayed`: the share of replayed groups after the first SETTLED batches. `uses`: in how many
      batches a sample is at most.
    - `equal`: the share of the groups in batches whose rewards are all equal.
    - `skipped.NAME`: the items that a curator skipped. `wasted`: the share of the groups that count
      whose rewards are all equal, after the first half of the groups.
    - `drawn.PART`: the share of the tasks whose item's id begins with PART, for example the part of
      a mixture or the stage of a curriculum.
    """
    batches: list[BatchAssembled] = []
    groups: dict[int, GroupClosed] = {}
    tasks: list[TaskSubmitted] = []
    for event in events:
        match event:
            case BatchAssembled():
                batches.append(event)
            case GroupClosed():
                groups.setdefault(event.task, event)
            case TaskSubmitted() if event.purpose == "train":
                tasks.append(event)
    batches.sort(key=lambda one: one.version)
    counted = [one for one in groups.values() if one.deviation is not None]
    later = counted[len(counted) // 2 :]
    return {
        **_of_batches(batches, groups),
        "wasted": _share(sum(one.deviation == 0 for one in later), len(later)),
        **_of_tasks(tasks),
    }


def _of_batches(
    batches: Sequence[BatchAssembled], groups: Mapping[int, GroupClosed]
) -> dict[str, float]:
    sizes = [len({one.task for one in batch.samples}) for batch in batches[:-1]]
    uses = Counter((one.task, one.sample) for batch in batches for one in batch.samples)
    trained = [groups[task] for task in {task for task, _ in uses}]
    placed = {
        (batch.version, one.task, one.use > 0)
        for batch in batches[SETTLED:-1]
        for one in batch.samples
    }
    return {
        "batches": len(batches),
        "full": _share(sum(size == max(sizes, default=0) for size in sizes), len(sizes)),
        "replayed": _share(sum(replayed for _, _, replayed in placed), len(placed)),
        "uses": max(uses.values(), default=0),
        "equal": _share(sum(one.deviation == 0 for one in trained), len(trained)),
    }


def _of_tasks(tasks: Sequence[TaskSubmitted]) -> dict[str, float]:
    skipped: Counter[str] = Counter()
    for task in tasks:
        skipped.update(json.loads(task.labels.get("curation.skipped", "{}")))
    parts = Counter(one.item_id.rpartition("/")[0] for one in tasks)
    return {
        "tasks": len(tasks),
        **{f"skipped.{name}": count for name, count in sorted(skipped.items())},
        **{f"drawn.{name}": _share(count, len(tasks)) for name, count in parts.items() if name},
    }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
