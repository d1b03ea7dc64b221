"""Pools of env workers: who gets how many environments, and how soon a killed one's go on.

An environment takes a fixed time for a reset or a step, divided by the speed of its worker. The
agent, inference and scheduler are processes. The env workers are tasks of this process with a
client of their own each, or processes where one is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from statistics import quantiles

from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    LoadReported,
    ObservationRecorded,
)
from headrace.schemas.packed import unpack_i32
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ACTIONS, LOADS, OBSERVATIONS, OUTCOMES, RESULTS
from headrace.services.env import service
from headrace.services.env.null import NullEnvironment
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.deployment import Deployment, a_worker, deployed
from tests.bench.episodes import Driver, null_recipe
from tests.bench.report import Figure

SLOTS, ACTION_S, TURNS = 32, 0.5, 4
SPEEDS = (1.0, 0.6, 0.3)
SETTLE_S, WINDOW_S, KILLED_S = 10.0, 30.0, 20.0


class SlowEnvironment(NullEnvironment):
    """Takes a fixed time for an action, divided by the speed of its worker."""

    def __init__(self, speed: float = 1.0) -> None:
        super().__init__(TURNS, 1000 * ACTION_S / speed)


def pool_recipe(live: int, slots: int = SLOTS) -> Recipe:
    """Episodes whose environments take a while, and whose generations take none."""
    tree = null_recipe({}, live=live, turns=TURNS, seconds=600).model_dump(mode="json")
    own = {"use": "tests.bench.env_pools:SlowEnvironment", "slots": slots, "options": {}}
    tree["environments"]["default"] |= own
    return Recipe.model_validate(tree)


def an_env_worker(
    deployment: Deployment, name: str, speed: float
) -> AbstractAsyncContextManager[None]:
    """Runs an env worker until the context ends."""
    tree = deployment.recipe.model_dump(mode="json")
    tree["environments"]["default"]["options"] = {"speed": speed}
    return a_worker(deployment, name, service.run, Recipe.model_validate(tree))


async def opened_by(
    cluster: ClusterConfig, speeds: Sequence[float], live: int, seconds: float, slots: int = SLOTS
) -> Counter[str]:
    """The environments that workers of these speeds open in some seconds, by worker."""
    opened: Counter[str] = Counter()

    async def follow(deployment: Deployment) -> None:
        async with deployment.following(OBSERVATIONS) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.event, ObservationRecorded)
                opened[delivery.event.instance] += delivery.event.index == 0

    async with deployed(cluster, pool_recipe(live, slots)) as deployment, AsyncExitStack() as stack:
        await deployment.publish_initial()
        await stack.enter_async_context(deployment.serving("agent", "inference", "scheduler"))
        for number, speed in enumerate(speeds):
            await stack.enter_async_context(an_env_worker(deployment, f"env-{number:02}", speed))
        results = await stack.enter_async_context(deployment.following(RESULTS))
        driving = asyncio.create_task(Driver(deployment).run(results, 1_000_000, live))
        following = asyncio.create_task(follow(deployment))
        try:
            while not opened:
                await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE_S)
            before = opened.copy()
            await asyncio.sleep(seconds)
            return opened - before
        finally:
            for task in (driving, following):
                task.cancel()
            await asyncio.gather(driving, following, return_exceptions=True)


async def after_kill(cluster: ClusterConfig) -> tuple[list[float], Counter[int]]:
    """Kills one of three env workers. Returns how long each action took that was in its partitions
    then, or came there before they had another owner, from the kill or from when it was sent; and
    the number of attempts of all episodes."""
    async with deployed(cluster, pool_recipe(live=96)) as deployment, AsyncExitStack() as stack:
        await deployment.publish_initial()
        services = ("agent", "inference", "scheduler", "env", "env", "env")
        await stack.enter_async_context(deployment.serving(*services))
        results = await stack.enter_async_context(deployment.following(RESULTS))
        loads = await stack.enter_async_context(deployment.following(LOADS))
        driving = asyncio.create_task(Driver(deployment).run(results, 1_000_000, 96))
        found: set[str] = set()
        async for delivery in loads:
            if isinstance(delivery.event, LoadReported) and delivery.event.environments:
                found.add(delivery.event.worker)
            if len(found) == 3:
                break
        try:
            await asyncio.sleep(SETTLE_S)
            victim = min(found)
            killed_s = time.time()
            os.kill(int(victim.rpartition("-")[2]), signal.SIGKILL)
            await asyncio.sleep(KILLED_S)
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)
        return await _gaps(deployment, victim, killed_s)


async def _gaps(
    deployment: Deployment, victim: str, killed_s: float
) -> tuple[list[float], Counter[int]]:
    log = deployment.log
    topics = (ACTIONS, OBSERVATIONS, LOADS, OUTCOMES)
    partitions = [one for topic in topics for one in log.topics.partitions_of(topic)]
    sent: dict[str, tuple[float, int]] = {}
    answered: dict[str, float] = {}
    attempts: Counter[int] = Counter()
    lost: set[int] = set()
    owned_s: dict[int, float] = {}
    async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
        async for one in deliveries:
            event, at_s = one.event, one.recorded_at
            if isinstance(event, ActionRequested) and event.kind != "close":
                sent.setdefault(event.event_id, (at_s, one.partition.number))
            elif isinstance(event, ObservationRecorded):
                answered.setdefault(event.event_id, at_s)
            elif isinstance(event, EpisodeEnded):
                attempts[event.attempts] += 1
            elif isinstance(event, LoadReported) and event.environments:
                held = unpack_i32(event.environments[0].partitions)
                if event.worker == victim:
                    lost = set(held)
                elif at_s > killed_s:
                    for number in held:
                        owned_s.setdefault(number, at_s)
    waited = [
        answered.get(action, killed_s + KILLED_S) - max(killed_s, at_s)
        for action, (at_s, number) in sent.items()
        if number in lost
        and at_s < owned_s.get(number, killed_s + KILLED_S)
        and killed_s < answered.get(action, killed_s + KILLED_S)
    ]
    return waited, attempts


async def env_pools(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Shares at speeds of 100, 60 and 30 %, twelve workers on four partitions, and a killed one."""
    window_s = WINDOW_S * scale
    figures = []
    for live, kind in ((2 * 3 * SLOTS, "all slots in use"), (SLOTS, "a third of the slots in use")):
        opened = await opened_by(cluster, SPEEDS, live, window_s)
        total = sum(opened.values())
        shares = [opened[f"env-{number:02}"] / total for number in range(len(SPEEDS))]
        fair = [one / sum(SPEEDS) for one in SPEEDS]
        worst = max(abs(share / one - 1) for share, one in zip(shares, fair, strict=True))
        figures.append(
            Figure(
                f"env workers at 100/60/30 %, {kind}, largest error",
                f"{worst:.1%}",
                "10%",
                "",
                " ".join(f"{share:.3f}" for share in shares)
                + ", in proportion "
                + " ".join(f"{one:.3f}" for one in fair)
                + f"; {total / window_s:.1f} environments/s",
            )
        )
    opened = await opened_by(cluster, (1.0,) * 12, 192, window_s, slots=16)
    counts = [opened[f"env-{number:02}"] for number in range(12)]
    figures.append(
        Figure(
            "12 env workers on 4 partitions, least share",
            f"{12 * min(counts) / sum(counts):.2f}",
            "> 0",
            "1",
            f"{sum(counts) / window_s:.1f} environments/s",
        )
    )
    waited, attempts = await after_kill(cluster)
    figures.append(
        Figure(
            "actions of an env worker after kill -9, p99",
            f"{quantiles(waited, n=100)[98]:.1f} s",
            "10 s",
            "5 s",
            f"{len(waited)} actions, p50 {quantiles(waited, n=2)[0]:.1f} s, longest "
            f"{max(waited):.1f} s; episodes by attempts {dict(sorted(attempts.items()))}",
        )
    )
    return figures
