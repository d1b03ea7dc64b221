"""`headrace cancel` on a real broker: what waits never starts, what runs ends, all is told."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.infra import local
from headrace.schemas.events import Blob, EpisodeStarted, Event, PolicyPublished, TaskEnded
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import EPISODES, RESULTS, Topics
from headrace.services.agent import service as agent
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import follow_events
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from headrace.services.scheduler import service as scheduler
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.worker.service_context import ServiceContext
from tests.commands import cluster_variables

BOUND_S = 60.0
SETTINGS = (
    *("scheduler.live_episodes=2", "tasks.samples=2", "tasks.deadline_s=600"),
    *("scheduler.starts_per_s=1000", "scheduler.require_reports=false"),
)

VERSION_0 = PolicyPublished(
    policy="default",
    version=0,
    status="initial",
    digest=bytes(32),
    full=Blob(sha256=bytes(32), size=0),
    full_version=0,
)


async def headrace(*arguments: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """What a command prints, which must end well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", *arguments, "--json"),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, error = await asyncio.wait_for(process.communicate(), BOUND_S)
    assert process.returncode == 0, error.decode()
    return [json.loads(line) for line in out.decode().splitlines()]


class Watch:
    """What was started and what has ended, as it comes."""

    def __init__(self, log: EventLog) -> None:
        topics = log.topics
        self.started: set[int] = set()
        self.ended: dict[int, TaskEnded] = {}
        self._reader = follow_events(
            log,
            dict.fromkeys(
                [*topics.partitions_of(EPISODES), *topics.partitions_of(RESULTS)], "first"
            ),
        )
        self._news = asyncio.Event()

    async def follow(self) -> None:
        """Reads for ever."""
        async for item in self._reader:
            if isinstance(item, Delivery):
                self._note(item.event)
                self._news.set()

    async def until(self, *, started: set[int], ended: set[int]) -> None:
        """Waits until so many tasks were started, and so many have ended."""
        async with asyncio.timeout(BOUND_S):
            while self.started != started or self.ended.keys() != ended:
                self._news.clear()
                await self._news.wait()

    def _note(self, event: Event) -> None:
        if isinstance(event, TaskEnded):
            self.ended[event.task] = event
        elif isinstance(event, EpisodeStarted):
            self.started.add(event.task)


@asynccontextmanager
async def serving(log: EventLog, recipe: Recipe, state: Path) -> AsyncIterator[Watch]:
    """A scheduler and an agent worker: nobody answers, so what runs runs until it is cancelled."""
    stopping = asyncio.Event()
    blobs = LocalBlobStore(state / "blobs")
    context = ServiceContext(log, recipe, blobs, "test", state, stopping, asyncio.Event())
    watch = Watch(log)
    following = asyncio.create_task(watch.follow())
    services = [asyncio.create_task(one.run(context)) for one in (scheduler, agent)]
    try:
        yield watch
    finally:
        stopping.set()
        following.cancel()
        await asyncio.wait({*services, following})
        for service in services:
            service.result()


def test_tasks_are_cancelled_wherever_they_are(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = cluster_variables(local_stack, namespace)
    recipe = read_recipe("null", SETTINGS)
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)

    async def cancel(*arguments: str) -> list[tuple[int | None, str]]:
        told = await headrace("cancel", *arguments, environment=environment)
        return [(one["task"], one["state"]) for one in told]

    async def main() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(Topics(namespace, ("default",), recipe.partitions))
            await apply(log, recipe)
            for number in range(5):
                await log.send(TaskMaker(recipe, "team").make(Item("item"), f"t{number}"))
            await log.send(VERSION_0)
            async with serving(log, recipe, tmp_path) as watch:
                await watch.until(started={0}, ended=set())
                assert await cancel("0", "2", "--reason", "wrong image") == [
                    (0, "running"),
                    (2, "queued"),
                ]
                began = time.monotonic()
                await watch.until(started={0, 1, 2}, ended={0, 2})
                print(f"ended {time.monotonic() - began:.3f} s after the command did")
                assert await cancel("--source", "team", "later", "t1") == [
                    (None, "unknown"),
                    (1, "running"),
                ]
                await watch.until(started={0, 1, 2, 3}, ended={0, 1, 2})
                assert await cancel("--all-queued") == [(4, "queued")]
                assert await cancel("3", "0") == [(3, "running"), (0, "ended")]
                await watch.until(started=set(range(5)), ended=set(range(5)))
                check(watch)
            deliveries, _ = await read_all(log)
            report = examine(recipe, deliveries)
            assert not report.violations, str(report)

    asyncio.run(main())


def check(watch: Watch) -> None:
    """How the tasks ended: who was started has both samples, who was not a single one."""
    assert {len(watch.ended[task].outcomes) for task in (0, 1, 3)} == {2}
    assert {len(watch.ended[task].outcomes) for task in (2, 4)} == {1}
    for ended in watch.ended.values():
        assert ended.closed_by == "cancelled"
        reason = "wrong image" if ended.task in (0, 2) else ""
        for outcome in ended.outcomes:
            assert (outcome.ending, outcome.reward) == ("cancelled", None)
            assert outcome.failure is not None
            assert outcome.failure.message == reason
