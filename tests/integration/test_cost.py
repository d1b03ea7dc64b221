"""`headrace cost` on a real broker: processes that end in order, and one that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.infra import local
from headrace.schemas.events import InstanceStateEntered
from headrace.schemas.topics import INSTANCES
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.cli import cli
from tests.commands import cluster_variables
from tests.integration.test_cancel import VERSION_0

SETTINGS = ("workers.price_per_hour.scheduler=3600", "workers.price_per_hour.agent=7200")
Records = list[tuple[float, InstanceStateEntered]]


def serve(service: str, environment: dict[str, str], state: Path) -> subprocess.Popen[bytes]:
    arguments = [item for one in SETTINGS for item in ("--set", one)]
    command = [sys.executable, "-m", "headrace", "serve", service, "null", *arguments]
    with open(state / f"{service}.log", "wb") as log:
        return subprocess.Popen(command, env={**os.environ, **environment}, stderr=log)


def test_the_report_equals_a_sum_by_hand(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = cluster_variables(local_stack, namespace, tmp_path)
    recipe = read_recipe("null", SETTINGS)
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)

    async def records(least: int) -> Records:
        """What is recorded of workers' lives, once there are so many records."""
        async with connect(cluster, "test") as connection:
            log = connection.log(topics_of(recipe, namespace))
            while True:
                at = {log.topics.partition(INSTANCES): WHOLE}
                found: Records = []
                async with aclosing(read_events(log, at)) as deliveries:
                    async for delivery in deliveries:
                        if isinstance(delivery.event, InstanceStateEntered):
                            found.append((delivery.recorded_at, delivery.event))
                if len(found) >= least:
                    return found
                await asyncio.sleep(0.2)

    async def begin() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            await log.send(VERSION_0)

    def shown(*arguments: str) -> dict[str, Any]:
        found = CliRunner().invoke(cli, ["cost", "--json", *arguments], env=environment)
        assert found.exit_code == 0, found.output
        tree: dict[str, Any] = json.loads(found.stdout)
        return tree

    asyncio.run(begin())
    before_s = time.time()
    processes = [serve("scheduler", environment, tmp_path), serve("agent", environment, tmp_path)]
    try:
        asyncio.run(asyncio.wait_for(records(2), 30.0))
        time.sleep(1.0)
        processes[0].send_signal(signal.SIGTERM)
        processes[1].kill()
        assert processes[0].wait(15) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    whole_s = time.time() - before_s
    found = asyncio.run(asyncio.wait_for(records(3), 30.0))
    assert [one.state for _, one in found if one.service == "scheduler"] == ["ready", "gone"]
    ((begun, _), (gone, last)) = [one for one in found if one[1].service == "scheduler"]
    lived_s = gone - last.began_at / 1000
    assert 1.0 <= gone - begun <= lived_s <= whole_s

    tree = shown()
    pools = {pool["pool"]: pool for pool in tree["pools"]}
    scheduler, agent = pools["scheduler"], pools["agent"]
    assert scheduler["hours"] * 3600 == pytest.approx(lived_s)
    assert scheduler["cost"] == pytest.approx(lived_s)
    assert (scheduler["alive"], scheduler["peak"], scheduler["unsure_hours"]) == (0, 1, 0)
    # Whether the killed one is still alive shows a minute later at the latest.
    assert agent["alive"] == 1
    assert tree["cost"] == pytest.approx(scheduler["cost"] + agent["cost"])
    assert (tree["tasks"], tree["versions"], tree["complete"]) == (0, {}, True)
    assert shown("--price", "scheduler=0")["pools"][1]["cost"] == 0
    wrong = CliRunner().invoke(cli, ["cost", "--price", "gpu=1"], env=environment)
    assert "no such pool" in f"{wrong.output} {wrong.exception}"
