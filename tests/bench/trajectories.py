"""Trajectories from their producer to the trainer's decoded batch, each durable on the way.

Trajectories of 1,024 sampled tokens, in groups of 8. What an agent worker sends at an episode's
end is sent here through the same `EventLog.send`: the trajectory, its outcome, and the task's
result. From there on it is the real thing: assemble-groups (Faust), assemble-batches, and the
trainer's own loading of batches. Producer and loader are processes of their own.

Nothing is trained, and no version published but the first: the assembling is let run ahead.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace

from headrace.schemas.events import Blob, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES
from headrace.services.namespace.cluster_config import ClusterConfig, write_resolved
from tests.bench.cpu import CpuWatch
from tests.bench.deployment import Deployment, deployed
from tests.bench.report import Figure, rate

GROUP = 8
GROUPS_A_BATCH = 16
BATCH = GROUP * GROUPS_A_BATCH
WARM_UP = 8 * BATCH
JOBS = ("assemble-groups", "assemble-batches")
BOUND_S = 300.0


def pipeline_recipe() -> Recipe:
    """Groups of 8, batches of 16 groups, never stale, never waiting for the trainer."""
    far = 10**9
    batches = {"groups": GROUPS_A_BATCH, "max_staleness": far, "prefetch": far}
    return Recipe.model_validate(
        {
            "name": "bench-trajectories",
            "tasks": {"samples": GROUP},
            "policies": {"default": {"model": "tiny-llama", "batches": batches}},
        }
    )


async def durable_trajectories(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Every stage by itself over the backlog of the one before it, then all at once."""
    batches = max(2, int(96 * scale))
    figures = await _stages(cluster, batches)
    for jobs in (1, 2):
        figures.append(await _all_at_once(cluster, batches, jobs))
    return figures


async def _stages(cluster: ClusterConfig, batches: int) -> list[Figure]:
    count = batches * BATCH
    async with deployed(cluster, pipeline_recipe()) as deployment:
        await publish_start(deployment)
        async with _Work(deployment, "produce") as producer:
            cpu = CpuWatch(cluster.state)
            await producer.run(first_task=0, groups=0)
            produced = await producer.run(first_task=0, groups=batches * GROUPS_A_BATCH)
            spent = cpu.text(count)
        async with deployment.serving(*JOBS):
            assembled_s = await _assembling_seconds(deployment, batches)
        async with _Work(deployment, "load") as loader:
            loaded = await loader.run(batches=batches)
    left = (batches - 1) * BATCH
    return [
        Figure(
            "  produce alone",
            rate(count, produced["seconds"]),
            note=f"{count:,} trajectories; {spent}",
        ),
        Figure("  assemble groups and batches alone", rate(left, assembled_s)),
        Figure("  fetch and decode alone", rate(count, loaded["seconds"])),
    ]


async def _all_at_once(cluster: ClusterConfig, batches: int, jobs: int) -> Figure:
    count = batches * BATCH
    warm_up = WARM_UP // BATCH
    async with deployed(cluster, pipeline_recipe()) as deployment:
        await publish_start(deployment)
        async with (
            deployment.serving(*("assemble-groups",) * jobs, "assemble-batches"),
            _Work(deployment, "load") as loader,
            _Work(deployment, "produce") as producer,
        ):
            groups = warm_up * GROUPS_A_BATCH
            await producer.run(first_task=0, groups=groups)
            await loader.run(batches=warm_up)
            cpu = CpuWatch(cluster.state)
            loading = asyncio.create_task(loader.run(batches=batches))
            produced = await producer.run(first_task=groups, groups=batches * GROUPS_A_BATCH)
            loaded = await loading
            spent = cpu.text(count)
    seconds = loaded["ended"] - produced["began"]
    return Figure(
        f"durable trajectories/s, {jobs} assemble-groups",
        rate(count, seconds),
        "6,000/s",
        "10,000/s",
        f"{count:,} in {seconds:.1f} s; batch to trainer p50 {loaded['age_s']:.2f} s; {spent}",
    )


async def publish_start(deployment: Deployment) -> None:
    """Version 0, by the record alone: nobody serves it."""
    blank = bytes(32)
    await deployment.log.send(
        PolicyPublished(
            policy="default",
            version=0,
            status="initial",
            digest=blank,
            full=Blob(sha256=blank, size=0),
            full_version=0,
        )
    )


async def _assembling_seconds(deployment: Deployment, batches: int) -> float:
    """From the first batch's record to the last one's, by the broker's clock."""
    times: list[float] = []
    async with asyncio.timeout(BOUND_S), deployment.following(BATCHES, "default") as deliveries:
        async for delivery in deliveries:
            times.append(delivery.recorded_at)
            if len(times) == batches:
                break
    return max(0.001, times[-1] - times[0])


class _Work:
    """A process of `tests.bench.work`: an order a line in, what came of it a line out."""

    def __init__(self, deployment: Deployment, kind: str) -> None:
        cluster = replace(deployment.cluster, state=deployment.cluster.state.absolute())
        recipe = str(write_resolved(deployment.recipe, cluster.state))
        self._command = [sys.executable, "-m", "tests.bench.work", kind, recipe, cluster.to_json()]
        self._process: Process | None = None

    async def __aenter__(self) -> _Work:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, limit=1 << 24
        )
        return self

    async def run(self, **order: int) -> dict[str, float]:
        """Orders work and waits for its end, bounded."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), BOUND_S)
        if not line:
            raise RuntimeError(f"{self._command[3]} ended before its work")
        answer: dict[str, float] = json.loads(line)
        return answer

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
