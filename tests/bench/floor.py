"""The least that a turn and a trajectory can cost: their way through Kafka with nothing behind it.

Processes pass records on with the settings of Headrace's clients and without Headrace: see
`bare.py` and `bare_trajectories.py`. Beside `episodes` and `trajectories` this shows which part of
their cost is Kafka's and its client's. Turns are measured with the partitions that the topics of
pools have, and with few.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from statistics import quantiles
from typing import Any
from uuid import uuid4

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.schemas.topics import POOL_PARTITIONS
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.bare import FEW, HOPS
from tests.bench.bare_trajectories import PARTITIONS
from tests.bench.cpu import CpuWatch
from tests.bench.report import Figure, rate
from tests.bench.trajectories import BATCH

WARM_UP = 6_000
TURNS = {1: 800, 16: 4_000, 256: 12_000}
"""By the number of records that go round at the same time."""
BATCHES = 96
"""Of trajectories, once to warm up and once measured."""
LINE_BYTES = 2**24
"""The longest line that a process writes."""


async def floor(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Turns with 1, 16 and 256 records that go round, with many and with few partitions; then
    trajectories.
    """
    figures = []
    for partitions in (POOL_PARTITIONS, FEW):
        figures += await _turns(cluster, scale, partitions)
    return [*figures, await _trajectories(cluster, scale)]


async def _turns(cluster: ClusterConfig, scale: float, partitions: int) -> list[Figure]:
    figures = []
    servers, prefix = cluster.bootstrap_servers, f"bare-{uuid4().hex[:8]}"
    assert servers is not None
    prompts, answers, actions, observations = (f"{prefix}.{hop}" for hop in HOPS)
    counts = dict(zip(HOPS, (partitions, FEW, partitions, FEW), strict=True))
    await asyncio.to_thread(_make_topics, servers, prefix, counts)
    commands = [
        ("bare", "relay", servers, prompts, answers, str(partitions)),
        ("bare", "relay", servers, actions, observations, str(partitions)),
        ("bare", "turns", servers, prefix),
    ]
    async with _processes(commands) as (_, _, turning):
        await _order(turning, f"16 {round(WARM_UP * scale) + 16}")
        for live, turns in TURNS.items():
            count = round(turns * scale) + live
            cpu = CpuWatch(cluster.state)
            seconds, took = await _order(turning, f"{live} {count}")
            spread = quantiles(took, n=20)
            name = f"bare turn, {live} live, pools of {partitions} partitions"
            note = f"{rate(count, seconds)}; {cpu.text(count)}"
            figures += [
                Figure(f"{name}, p50", f"{spread[9]:.2f} ms", note=note),
                Figure(f"{name}, p95", f"{spread[18]:.2f} ms"),
            ]
    return figures


async def _trajectories(cluster: ClusterConfig, scale: float) -> Figure:
    """All stages at once, as `trajectories` has them."""
    servers, prefix = cluster.bootstrap_servers, f"bare-{uuid4().hex[:8]}"
    assert servers is not None
    await asyncio.to_thread(_make_topics, servers, prefix, PARTITIONS)
    kinds = ("groups", "batches", "load", "produce")
    commands = [("bare_trajectories", kind, servers, prefix) for kind in kinds]
    count = BATCH * max(2, round(BATCHES * scale))
    async with _processes(commands) as (_, _, loading, producing):
        await asyncio.gather(_order(loading, count), _order(producing, count))
        cpu, began = CpuWatch(cluster.state), time.time()
        ended, _ = await asyncio.gather(_order(loading, count), _order(producing, count))
        return Figure("bare trajectories/s", rate(count, ended - began), note=cpu.text(count))


def _make_topics(servers: str, prefix: str, partitions: Mapping[str, int]) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    topics = [NewTopic(f"{prefix}.{name}", count) for name, count in partitions.items()]
    for made in admin.create_topics(topics).values():
        made.result(30)


@asynccontextmanager
async def _processes(commands: Sequence[Sequence[str]]) -> AsyncIterator[Sequence[Process]]:
    """Processes of modules of this package, each of which has said that it is ready."""
    processes = []
    async with AsyncExitStack() as stack:
        for module, *arguments in commands:
            whole = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
            process = await asyncio.create_subprocess_exec(
                *whole, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES
            )
            stack.push_async_callback(_end, process)
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
            processes.append(process)
        yield processes


async def _end(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _order(process: Process, order: object) -> Any:
    """Has a process do something, and returns its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{order}\n".encode())
    return json.loads(await process.stdout.readline())
