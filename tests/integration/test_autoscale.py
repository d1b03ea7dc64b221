"""`headrace autoscale` on a real broker: lines, gauges and a hook, until the run ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

from headrace.infra import local
from headrace.schemas import packed
from headrace.schemas.events import LoadReported, PolicyPublished, PoolLoad
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from tests.commands import cluster_variables

BOUND_S = 150.0
WORKERS = 2


def report(worker: int, number: int) -> LoadReported:
    load = PoolLoad(
        policy="default",
        partitions=packed.pack_i32([worker]),
        slots=4,
        busy=4,
        waiting=20,
        run_ms=100,
    )
    return LoadReported(worker=str(worker), number=number, every_ms=1000, pools=(load,))


def version(number: int) -> PolicyPublished:
    return PolicyPublished(
        policy="default",
        version=number,
        status="trained",
        digest=bytes(32),
        full_version=0,
        wait_s=0.25,
        step_s=0.25,
    )


async def act(log: EventLog) -> None:
    """Two workers report, and the trainer waits for half of its time."""
    number = 0
    while True:
        for worker in range(WORKERS):
            await log.send(report(worker, number))
        await log.send(version(number))
        number += 1
        await asyncio.sleep(0.5)


def test_the_wanted_number_is_exported(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = read_recipe("quickstart", ())
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)
    environment = {**os.environ, **cluster_variables(local_stack, namespace)}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = tmp_path / "said"
    # The first try fails, so the hook is run again.
    hook = f'test -e {said}.tried || {{ touch {said}.tried; exit 1; }}; echo "$HEADRACE_WANTED of \
$HEADRACE_WORKERS in $HEADRACE_NAMESPACE" > {said}.new; mv {said}.new {said}'

    async def main() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            acting = asyncio.create_task(act(log))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace", "autoscale", "--json", "--window", "2"),
                *("--most", "6", "--hook", hook, "--metrics-port", str(port)),
                env=environment,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            try:
                lines: list[dict[str, Any]] = []
                while not lines or lines[-1]["wait"] is None:
                    lines.append(json.loads(await process.stdout.readline()))
                assert lines[-1]["wanted"] == 4
                assert (lines[-1]["workers"], lines[-1]["wait"]) == (WORKERS, 0.5)
                while not said.exists():
                    await asyncio.sleep(0.1)
                assert said.read_text() == f"4 of 2 in {namespace}\n"
                found = await asyncio.to_thread(
                    lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
                )
                assert f'headrace_workers_wanted{{namespace="{namespace}"}} 4.0' in found.decode()
                assert f'headrace_trainer_wait{{namespace="{namespace}"}} 0.5' in found.decode()
                await enter(log, "ending", recipe)
                await enter(log, "ended", recipe)
                assert await process.wait() == 0
            finally:
                acting.cancel()
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
