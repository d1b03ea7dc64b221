"""How long `headrace end` waits for processes elsewhere before it ends the tasks itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import EPISODES
from headrace.services.kafka.broker import Committed, Partition
from headrace.services.namespace.apply import apply, shared_partitions
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from headrace.services.operate.end import end
from headrace.services.operate.run.progress import Progress
from headrace.services.tasks.source import SOURCE
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

QUIET_S = 3.0
RECIPE = Recipe.model_validate({"name": "n", "policies": {"default": {"model": "tiny-llama"}}})


async def ignore_assigned(_: object) -> None:
    """A member that does nothing."""


async def ignore_revoked(_: object, lost: bool) -> dict[Partition, Committed]:
    """Commits nothing."""
    return {}


async def waited(*, workers: int, started_s_ago: float) -> float:
    """Seconds until a run with an open task counts as one without processes."""
    broker = MemoryBroker()
    log = await Connection(broker, cast("Any", MemoryRegistry()), "test").writing_log(
        topics_of(RECIPE, "n")
    )
    life = await apply(log, RECIPE)
    await log.send(TaskMaker(RECIPE, SOURCE).make(Item("a"), "t"))
    await enter(log, "ending", RECIPE, "test")
    group, _ = shared_partitions(log.topics, "agent")
    for _ in range(workers):
        broker.subscribe([log.topics.name(EPISODES)], group, ignore_assigned, ignore_revoked)
    began = time.monotonic()
    found = await end._end_by_others(log, Progress(RECIPE), life.started_at - started_s_ago)
    assert found is None
    took_s = time.monotonic() - began
    await broker.close()
    return took_s


@pytest.mark.parametrize(
    ("workers", "started_s_ago", "waits"),
    [(0, 60.0, False), (1, 60.0, True), (0, -60.0, True)],
    ids=["paused", "has a worker", "just starts"],
)
def test_a_paused_run_is_not_waited_for(
    workers: int, started_s_ago: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end, "QUIET_S", QUIET_S)
    took_s = asyncio.run(asyncio.wait_for(waited(workers=workers, started_s_ago=started_s_ago), 30))
    assert (took_s >= QUIET_S) == waits
