"""The least that a turn can cost: its four hops through Kafka with nothing behind them.

Three processes pass records round through four topics, with the settings of Headrace's clients and
without Headrace: see `bare.py`. Beside `episodes` it shows which part of a turn is Kafka's and its
client's. It runs with the partitions that the topics of pools have, and with few.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import quantiles
from uuid import uuid4

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.schemas.topics import POOL_PARTITIONS
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.bare import FEW, HOPS
from tests.bench.cpu import CpuWatch
from tests.bench.report import Figure, rate

WARM_UP = 6_000
TURNS = {1: 800, 16: 4_000, 256: 12_000}
"""By the number of records that go round at the same time."""
LINE_BYTES = 2**24
"""The longest line that a process writes."""


async def floor(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Turns with 1, 16 and 256 records that go round, with many and with few partitions."""
    figures = []
    servers = cluster.bootstrap_servers
    assert servers is not None
    for partitions in (POOL_PARTITIONS, FEW):
        prefix = f"bare-{uuid4().hex[:8]}"
        await asyncio.to_thread(_make_topics, servers, prefix, partitions)
        async with _processes(servers, prefix, partitions) as turning:
            await _turn(turning, 16, round(WARM_UP * scale) + 16)
            for live, turns in TURNS.items():
                count = round(turns * scale) + live
                cpu = CpuWatch(cluster.state)
                seconds, took = await _turn(turning, live, count)
                spread = quantiles(took, n=20)
                name = f"bare turn, {live} live, pools of {partitions} partitions"
                note = f"{rate(count, seconds)}; {cpu.text(count)}"
                figures += [
                    Figure(f"{name}, p50", f"{spread[9]:.2f} ms", note=note),
                    Figure(f"{name}, p95", f"{spread[18]:.2f} ms"),
                ]
    return figures


def _make_topics(servers: str, prefix: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    counts = dict(zip(HOPS, (partitions, FEW, partitions, FEW), strict=True))
    topics = [NewTopic(f"{prefix}.{hop}", count) for hop, count in counts.items()]
    for made in admin.create_topics(topics).values():
        made.result(30)


@asynccontextmanager
async def _processes(servers: str, prefix: str, partitions: int) -> AsyncIterator[Process]:
    """Two relays and what has records go round, all of which read."""
    prompts, answers, actions, observations = (f"{prefix}.{hop}" for hop in HOPS)
    commands = [
        ("relay", servers, prompts, answers, str(partitions)),
        ("relay", servers, actions, observations, str(partitions)),
        ("turns", servers, prefix),
    ]
    async with AsyncExitStack() as stack:
        for command in commands:
            whole = [sys.executable, "-m", "tests.bench.bare", *command]
            process = await asyncio.create_subprocess_exec(
                *whole, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert await process.stdout.readline() == b"reads\n"
        yield process


async def _turn(process: Process, live: int, count: int) -> tuple[float, list[float]]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{live} {count}\n".encode())
    seconds, took = json.loads(await process.stdout.readline())
    return seconds, took
