"""A whole run that is stalled in several ways: the wait graph names each cause within 15 s."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from headrace.infra import local
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import find_namespace
from headrace.services.operate.quota.quota import set_quota
from headrace.services.operate.verify.verify import verify
from headrace.services.operate.waits.side_watch import SideWatch
from headrace.services.operate.waits.wait_graph import Wait, likely_cause, wait_lines
from headrace.services.operate.waits.waits_reader import WaitsReader, reading_waits
from tests.e2e.harness import Command, child_of, end_all_of, headrace, run_bounded

NAMED_S = 15.0
"""A stall is named within this time."""
STARTED_S = 240.0
GOING_ON_S = 60.0
POLL_S = 0.3
RECIPE = ("null", "--set", "tasks.options.items=4000", "--set", "tasks.deadline_s=900")

Cause = Callable[[Wait], bool]


async def named(reader: WaitsReader, is_cause: Cause, limit_s: float = NAMED_S) -> float:
    """Waits until the likely cause is this one. Seconds it took."""
    began, waits = time.monotonic(), list[Wait]()
    while time.monotonic() - began < limit_s:
        waits = await reader.waits()
        cause = likely_cause(waits)
        if cause is not None and is_cause(cause):
            return time.monotonic() - began
        await asyncio.sleep(POLL_S)
    lines = "\n".join(wait_lines(waits, time.time()))
    raise AssertionError(f"not named within {limit_s:g} s:\n{lines}")


async def goes_on(reader: WaitsReader, is_cause: Cause) -> None:
    """Waits until the cause is gone."""
    async with asyncio.timeout(GOING_ON_S):
        while any(is_cause(one) for one in await reader.waits()):
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def stopped(process: psutil.Process) -> AsyncIterator[None]:
    """Stops a process, and lets it go on."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


async def started(run: Command, state: Path) -> ClusterConfig:
    """Waits until episodes are played. Returns the addresses of the run's stack."""
    await run.says("running", STARTED_S)
    stack = local.find(state)
    assert stack is not None
    return ClusterConfig(state, stack.bootstrap_servers, stack.registry_url)


@pytest.mark.long
def test_the_graph_names_what_stalls_a_run(tmp_path: Path) -> None:
    state = tmp_path / "state"

    async def main() -> None:
        async with headrace("run", *RECIPE, "--state", str(state)) as run:
            cluster = await started(run, state)
            async with connect(cluster, "test") as connection:
                topics, life = await find_namespace(connection, "null")
                log, recipe = connection.log(topics), life.recipe()
                side = SideWatch(cluster, "null", cluster.open_blobs(None))
                async with reading_waits(log, recipe, side) as reader:
                    async with asyncio.timeout(STARTED_S):
                        while not reader.live:
                            await asyncio.sleep(POLL_S)
                    for service in ("env", "inference", "agent", "scheduler"):
                        # The supervisor starts what has ended again, but not what is stopped.
                        def is_cause(one: Wait, service: str = service) -> bool:
                            gone = f"no {service} worker runs" in one.cause
                            return gone or (service in one.name and "not reported" in one.cause)

                        async with stopped(child_of(state, service)):
                            print(service, await named(reader, is_cause))
                        await goes_on(reader, is_cause)
                    writing = await connection.writing_log(topics)

                    async def limit(episodes: int | None) -> None:
                        await set_quota(
                            writing, recipe, "default", weight=None, live_episodes=episodes,
                            unlimited=episodes is None, reason="",
                        )  # fmt: skip

                    await limit(0)
                    print("quota", await named(reader, lambda one: "quota of tenant" in one.cause))
                    await limit(None)
                    await goes_on(reader, lambda one: "quota of tenant" in one.cause)
                    found = await verify(log, life)
                    assert found.holds, found.lines()
                    assert not found.ended
                    stack = local.find(state)
                    assert stack is not None
                    async with stopped(psutil.Process(stack.kafka_pid)):
                        print("broker", await named(reader, lambda one: one.kind == "broker"))
                    await goes_on(reader, lambda one: one.kind == "broker")
            run.kill(signal.SIGTERM)
            await run.ends(60)

    try:
        run_bounded(main(), 900.0)
    finally:
        end_all_of(state)
