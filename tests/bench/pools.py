"""Pools of inference workers: who gets how much, and how soon a new one works.

Each worker has an engine of 8 slots that takes a fixed time for a generation, so that what it can
do at most is known: its slots divided by that time. The agent, env and scheduler are processes. The
inference workers are tasks of this process, with a client of their own each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from contextvars import ContextVar
from statistics import quantiles
from time import perf_counter

from headrace.schemas.events import GenerationCompleted, GenerationRequested, LoadReported
from headrace.schemas.packed import unpack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import GENERATIONS, LOADS, PROMPTS, RESULTS
from headrace.services.inference import service
from headrace.services.inference.engine import EngineSetup
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.worker.service_context import ServiceContext
from tests.bench.deployment import Deployment, a_worker, deployed
from tests.bench.episodes import TOKENS_A_TURN, Driver, null_recipe
from tests.bench.report import Figure

SLOTS, GENERATION_S, TURNS = 8, 0.5, 4
SPEEDS = (1.0, 0.6, 0.3)
SETTLE_S, WINDOW_S, KILLED_S = 6.0, 20.0, 20.0

SPEED: ContextVar[float] = ContextVar("speed", default=1.0)


class SlowEngine(ScriptedEngine):
    """Takes a fixed time for a generation, divided by the speed of the task that makes it."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._delay_s = GENERATION_S / TOKENS_A_TURN / SPEED.get()


def inference_worker(
    deployment: Deployment, name: str, speed: float
) -> AbstractAsyncContextManager[None]:
    """Runs an inference worker until the context ends."""

    async def run(context: ServiceContext) -> None:
        SPEED.set(speed)
        await service.run(context)

    return a_worker(deployment, name, run)


class Answers:
    """Counts the answers of each worker, from the log."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.count: Counter[str] = Counter()

    async def follow(self) -> None:
        async with self._deployment.following(GENERATIONS) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.event, GenerationCompleted)
                self.count[delivery.event.worker] += 1

    async def during(self, seconds: float) -> Counter[str]:
        """Returns the answers of the next seconds."""
        before = self.count.copy()
        await asyncio.sleep(seconds)
        return self.count - before

    async def first_of(self, worker: str) -> float:
        """Waits for the first answer of a worker. Returns how many seconds it took."""
        began = perf_counter()
        while not self.count[worker]:
            await asyncio.sleep(0.01)
        return perf_counter() - began


def pool_recipe(live: int, partitions: int = 4) -> Recipe:
    """Null episodes whose generations take a while."""
    tree = null_recipe({"turns": TURNS}, live=live, turns=TURNS, seconds=600).model_dump(
        mode="json"
    )
    tree["partitions"] = partitions
    engine = {"use": "tests.bench.pools:SlowEngine", "slots": SLOTS, "options": {}}
    tree["policies"]["default"]["engine"] |= engine
    return Recipe.model_validate(tree)


@asynccontextmanager
async def a_pool(
    cluster: ClusterConfig, speeds: Sequence[float], live: int
) -> AsyncIterator[tuple[Deployment, Answers]]:
    """Workers of these speeds, with a constant number of live episodes."""
    async with deployed(cluster, pool_recipe(live)) as deployment:
        await deployment.publish_initial()
        answers = Answers(deployment)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(deployment.serving("agent", "env", "scheduler"))
            for number, speed in enumerate(speeds):
                await stack.enter_async_context(
                    inference_worker(deployment, f"worker-{number}", speed)
                )
            results = await stack.enter_async_context(deployment.following(RESULTS))
            driving = asyncio.create_task(Driver(deployment).run(results, 1_000_000, live))
            following = asyncio.create_task(answers.follow())
            try:
                for number in range(len(speeds)):
                    await answers.first_of(f"worker-{number}")
                await asyncio.sleep(SETTLE_S)
                yield deployment, answers
            finally:
                for task in (driving, following):
                    task.cancel()
                await asyncio.gather(driving, following, return_exceptions=True)


async def gaps_after_kill(cluster: ClusterConfig) -> list[float]:
    """Kills one of three workers. How long each prompt took that was in its partitions then, or
    came there before they had another owner, from the kill or from when it was sent."""
    async with deployed(cluster, pool_recipe(live=96)) as deployment, AsyncExitStack() as stack:
        await deployment.publish_initial()
        services = ("agent", "env", "scheduler", "inference", "inference", "inference")
        await stack.enter_async_context(deployment.serving(*services))
        results = await stack.enter_async_context(deployment.following(RESULTS))
        answers = Answers(deployment)
        driving = asyncio.create_task(Driver(deployment).run(results, 1_000_000, 96))
        following = asyncio.create_task(answers.follow())
        try:
            while len(answers.count) < 3:
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE_S)
            victim = min(answers.count)
            killed_s = time.time()
            os.kill(int(victim.rpartition("-")[2]), signal.SIGKILL)
            await asyncio.sleep(KILLED_S)
        finally:
            for task in (driving, following):
                task.cancel()
            await asyncio.gather(driving, following, return_exceptions=True)
        return await _gaps(deployment, victim, killed_s)


async def _gaps(deployment: Deployment, victim: str, killed_s: float) -> list[float]:
    log = deployment.log
    topics = (PROMPTS, GENERATIONS, LOADS)
    partitions = [one for topic in topics for one in log.topics.partitions_of(topic)]
    sent: dict[str, tuple[float, int]] = {}
    answered: dict[str, float] = {}
    lost: set[int] = set()
    owned_s: dict[int, float] = {}
    async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
        async for one in deliveries:
            event, at_s = one.event, one.recorded_at
            if isinstance(event, GenerationRequested):
                sent.setdefault(event.event_id, (at_s, one.partition.number))
            elif isinstance(event, GenerationCompleted):
                answered.setdefault(event.event_id, at_s)
            elif isinstance(event, LoadReported) and event.pools:
                held = unpack_i32(event.pools[0].partitions)
                if event.worker == victim:
                    lost = set(held)
                elif at_s > killed_s:
                    for number in held:
                        owned_s.setdefault(number, at_s)
    return [
        answered[prompt] - max(killed_s, at_s)
        for prompt, (at_s, number) in sent.items()
        if number in lost
        and at_s < owned_s[number]
        and killed_s < answered.get(prompt, killed_s + KILLED_S)
    ]


async def pools(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Shares at speeds of 100, 60 and 30 %, twelve workers on four partitions, and a new worker."""
    most = [SLOTS / GENERATION_S * speed for speed in SPEEDS]
    async with a_pool(cluster, SPEEDS, live=96) as (_, answers):
        found = await answers.during(WINDOW_S * scale)
    total = sum(found.values()) / (WINDOW_S * scale)
    shares = [found[f"worker-{number}"] / sum(found.values()) for number in range(len(SPEEDS))]
    fair = [one / sum(most) for one in most]
    figures = [
        Figure(
            "shares at 100/60/30 %, largest error",
            f"{max(abs(share / one - 1) for share, one in zip(shares, fair, strict=True)):.1%}",
            "10%",
            "",
            " ".join(f"{share:.3f}" for share in shares)
            + ", in proportion "
            + " ".join(f"{one:.3f}" for one in fair),
        ),
        Figure(
            "throughput at 100/60/30 %, of the sum",
            f"{total / sum(most):.3f}",
            "0.95",
            "",
            f"{total:.1f}/s generations of {sum(most):.1f}/s at most",
        ),
    ]
    async with a_pool(cluster, (1.0,) * 12, live=192) as (deployment, answers):
        found = await answers.during(WINDOW_S * scale)
        counts = [found[f"worker-{number}"] for number in range(12)]
        figures.append(
            Figure(
                "12 workers on 4 partitions, least share",
                f"{12 * min(counts) / sum(counts):.2f}",
                "> 0",
                "1",
                f"{sum(counts) / (WINDOW_S * scale):.0f}/s generations of "
                f"{12 * SLOTS / GENERATION_S:.0f}/s at most",
            )
        )
    async with a_pool(cluster, (1.0,), live=64) as (deployment, answers):
        began = perf_counter()
        async with inference_worker(deployment, "new", 1.0):
            await answers.first_of("new")
            first_s = perf_counter() - began
            rate = (await answers.during(5.0))["new"] / 5.0
            figures.append(
                Figure(
                    "a new worker's first answer, after its start",
                    f"{first_s:.2f} s",
                    "",
                    "",
                    f"with loading, joining and a generation of {GENERATION_S} s; then {rate:.1f}/s"
                    f" of {SLOTS / GENERATION_S:.0f}/s",
                )
            )
    gaps = await gaps_after_kill(cluster)
    figures.append(
        Figure(
            "prompts of a worker after kill -9, p99",
            f"{quantiles(gaps, n=100)[98]:.1f} s",
            "10 s",
            "5 s",
            f"{len(gaps)} prompts, p50 {quantiles(gaps, n=2)[0]:.1f} s, longest {max(gaps):.1f} s",
        )
    )
    return figures
