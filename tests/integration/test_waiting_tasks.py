"""Many tasks of one tenant wait on a real broker: they keep nobody waiting, and outlive a kill."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from headrace.infra import local
from headrace.schemas.events import TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import TASKS
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.quota.quota import set_quota
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.worker.open_episodes import recorded_waiting
from tests.commands import cluster_variables
from tests.integration.test_cancel import BOUND_S, VERSION_0, Watch

MANY = 12_000
SETTINGS = (
    *("scheduler.live_episodes=100", "tasks.samples=1", "tasks.deadline_s=600"),
    *("scheduler.tenants.busy.live_episodes=0", "scheduler.require_reports=false"),
    *("policies.default.batches.groups=64", "policies.default.batches.max_staleness=8"),
)


def of(recipe: Recipe, tenant: str, number: int) -> TaskSubmitted:
    made = TaskMaker(recipe, "team").make(Item("item"), f"{tenant}{number}")
    return made.model_copy(update={"tenant": tenant})


async def commit_of(log: EventLog, namespace: str) -> int:
    tasks = log.topics.partition(TASKS)
    return (await log.broker.committed(f"{namespace}.scheduler", [tasks]))[tasks].offset


def test_tasks_that_wait_keep_nobody_waiting_and_outlive_a_kill(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = read_recipe("null", SETTINGS)
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)
    variables = cluster_variables(local_stack, namespace, tmp_path)

    def start() -> subprocess.Popen[bytes]:
        sets = [text for setting in SETTINGS for text in ("--set", setting)]
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "scheduler", "null", *sets],
            env={**os.environ, **variables},
        )

    async def started(watch: Watch, numbers: set[int], limit_s: float = BOUND_S) -> float:
        """Seconds until exactly these tasks have started."""
        begun = time.monotonic()
        async with asyncio.timeout(limit_s):
            await watch.until(started=numbers, ended=set())
        return time.monotonic() - begun

    async def main() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            await log.send(VERSION_0)
            for first in range(0, MANY, 1_000):
                busy = (of(recipe, "busy", number) for number in range(first, first + 1_000))
                await asyncio.gather(*map(log.send, busy))
            await log.send(of(recipe, "other", MANY))
            watch = Watch(log)
            following = asyncio.create_task(watch.follow())
            process = start()
            try:
                # A task behind those of the busy tenant starts,
                await started(watch, {MANY})
                # and the next one starts at once.
                await log.send(of(recipe, "other", MANY + 1))
                assert await started(watch, {MANY, MANY + 1}, 5.0) < 2.0
                # The busy tenant's tasks are recorded, and the commit passes them.
                async with asyncio.timeout(BOUND_S):
                    while await commit_of(log, namespace) < MANY // 2:
                        await asyncio.sleep(0.1)
                record = await recorded_waiting(log)
                assert record is not None
                assert record.count >= MANY // 2
                # After a kill -9 all of them still wait, and others start.
                process.kill()
                process.wait()
                await log.send(of(recipe, "other", MANY + 2))
                process = start()
                await started(watch, {MANY, MANY + 1, MANY + 2})
                # They start in order as soon as they may.
                await set_quota(
                    log, recipe, "busy",
                    weight=None, live_episodes=50, unlimited=False, reason="",
                )  # fmt: skip
                others = {MANY, MANY + 1, MANY + 2}
                await started(watch, {*range(50), *others})
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
                following.cancel()
                await asyncio.wait({following})

    asyncio.run(main())
