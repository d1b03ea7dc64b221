"""Null episodes: what the event path itself costs, in time a turn and in episodes a second.

The model is the scripted engine (8 tokens a turn, at once), the environment the null one (4
steps, at once). Agent, env, inference and scheduler are processes of their own. This process
submits tasks of one sample and keeps a number of them live.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from statistics import quantiles
from typing import Any

from headrace.schemas.events import EpisodeEnded, TaskEnded, TrajectoryRecorded
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import OUTCOMES, RESULTS, TRAJECTORIES
from headrace.services.log.event_log import Delivery
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.bench.cpu import CpuWatch
from tests.bench.deployment import Deployment, deployed
from tests.bench.report import Figure, rate

TURNS = 4
TOKENS_A_TURN = 8
SERVICES = ("agent", "env", "inference", "scheduler")
WARM_UP = 64


def null_recipe(environment: Mapping[str, Any], *, live: int, turns: int, seconds: int) -> Recipe:
    """The null model and environment under the timing agent."""
    return Recipe.model_validate(
        {
            "name": "bench-null",
            "tasks": {
                "samples": 1,
                "max_turns": turns,
                "max_tokens": TOKENS_A_TURN * turns,
                "deadline_s": seconds,
            },
            "agents": {"default": {"use": "tests.bench.agents:timed"}},
            "environments": {"default": {"slots": live, "options": environment}},
            "scheduler": {"live_episodes": live},
            "policies": {
                "default": {
                    "model": "tiny-llama",
                    "training": False,
                    "engine": {"use": "scripted", "slots": 1024},
                    "sampling": {"max_tokens": TOKENS_A_TURN},
                }
            },
        }
    )


class Driver:
    """Submits tasks, a bounded number live at once, and sees their outcomes in the log."""

    def __init__(self, deployment: Deployment, agent: str = "default") -> None:
        tasks = deployment.recipe.tasks.model_copy(update={"agent": agent})
        recipe = deployment.recipe.model_copy(update={"tasks": tasks})
        self._log = deployment.log
        self._maker = TaskMaker(recipe, f"bench-{agent}")
        self._submitted = 0

    async def run(
        self,
        results: AsyncIterator[Delivery[Any]],
        episodes: int,
        live: int,
        ended: list[float] | None = None,
    ) -> tuple[float, list[int]]:
        """Runs episodes. Seconds from the first submission to the last end; the task numbers.

        `ended` gets the time of each end, in seconds since the epoch by the broker's clock.
        """
        began = time.perf_counter()
        numbers = list(await asyncio.gather(*(self._submit() for _ in range(min(live, episodes)))))
        pending: set[asyncio.Task[int]] = set()
        left = episodes
        async for delivery in results:
            assert isinstance(delivery.event, TaskEnded)
            outcome = delivery.event.outcomes[0]
            if outcome.ending != "finished":
                raise RuntimeError(f"an episode ended {outcome.ending}: {outcome.failure}")
            if ended is not None:
                ended.append(delivery.recorded_at)
            left -= 1
            if not left:
                break
            if len(numbers) + len(pending) < episodes:
                task = asyncio.create_task(self._submit())
                pending.add(task)
                task.add_done_callback(lambda done: numbers.append(done.result()))
                task.add_done_callback(pending.discard)
        return time.perf_counter() - began, numbers

    async def _submit(self) -> int:
        self._submitted += 1
        name = str(self._submitted)
        return (await self._log.send(self._maker.make(Item(name), name))).offset


async def turn_milliseconds(deployment: Deployment, tasks: set[int]) -> tuple[list[float], ...]:
    """Every turn of these tasks, as their agent measured it: whole turns, generations."""
    whole: list[float] = []
    generations: list[float] = []
    async with deployment.following(TRAJECTORIES) as deliveries:
        async for delivery in deliveries:
            assert isinstance(delivery.event, TrajectoryRecorded)
            if delivery.event.task not in tasks:
                continue
            for name, value in delivery.event.metrics.items():
                (whole if name.startswith("turn") else generations).append(value)
            tasks.discard(delivery.event.task)
            if not tasks:
                return whole, generations
    raise AssertionError("a topic is followed without end")


async def null_episodes(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Latency of a turn at 1 and 16 live episodes, and episodes a second at 256."""
    figures = []
    recipe = null_recipe({"turns": TURNS}, live=1024, turns=TURNS, seconds=120)
    async with deployed(cluster, recipe) as deployment:
        await deployment.publish_initial()
        driver = Driver(deployment)
        async with deployment.serving(*SERVICES), deployment.following(RESULTS) as results:
            await driver.run(results, max(4, int(WARM_UP * scale)), 16)
            for live, episodes in ((1, 200), (16, 1000)):
                count = max(8, int(episodes * scale))
                cpu = CpuWatch(cluster.state)
                seconds, numbers = await driver.run(results, count, live)
                spent = cpu.text(count)
                turns = await turn_milliseconds(deployment, set(numbers))
                figures += _latency(live, turns, f"{rate(count, seconds)} episodes; {spent}")
            count = max(32, int(3000 * scale))
            cpu = CpuWatch(cluster.state)
            seconds, _ = await driver.run(results, count, 256)
            figures.append(
                Figure(
                    "null 4-turn episodes/s",
                    rate(count, seconds),
                    "250/s",
                    "400/s",
                    f"256 live, {count} episodes in {seconds:.1f} s; {cpu.text(count)}",
                )
            )
    return figures


def _latency(live: int, turns: tuple[list[float], ...], spent: str) -> list[Figure]:
    whole, generations = (quantiles(values, n=20) for values in turns)
    what = f"added latency a turn, {live} live"
    note = f"{len(turns[0])} turns, generate alone p50 {generations[9]:.2f} ms; {spent}"
    bars = ("4 ms", "2.5 ms") if live == 1 else ("12 ms", "8 ms")
    return [
        Figure(f"{what}, p50", f"{whole[9]:.2f} ms", *bars, note),
        Figure(f"{what}, p95", f"{whole[18]:.2f} ms"),
    ]


async def live_episodes(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Episodes of two steps that sleep, all live at once in one agent worker."""
    live = max(16, int(10_000 * scale))
    sleep_s = 40.0 * min(1.0, scale) + 1.0
    environment = {"turns": 1, "delay_ms": sleep_s * 1000}
    recipe = null_recipe(environment, live=live, turns=1, seconds=600)
    async with deployed(cluster, recipe) as deployment:
        await deployment.publish_initial()
        driver = Driver(deployment)
        async with deployment.serving(*SERVICES), deployment.following(RESULTS) as results:
            memory = asyncio.create_task(_peak_memory(CpuWatch(cluster.state), ("agent", "env")))
            seconds, _ = await driver.run(results, live, live)
            memory.cancel()
            peaks = await memory
            most = await _most_live(deployment, live)
    agent, env = peaks[0] / 2**20, peaks[1] / 2**20
    return [
        Figure(
            "concurrent live episodes",
            f"{most:,}",
            "10,000",
            "100,000",
            f"one agent worker of {agent:,.0f} MiB, one env worker of {env:,.0f} MiB; "
            f"all of {live:,} ended in {seconds:.0f} s",
        )
    ]


async def _peak_memory(watch: CpuWatch, services: Sequence[str]) -> list[int]:
    """Most resident bytes of each service's process, until it is cancelled."""
    processes = [watch.processes()[service] for service in services]
    peaks = [0] * len(services)
    try:
        while True:
            sizes = [process.memory_info().rss for process in processes]
            peaks = [max(peak, size) for peak, size in zip(peaks, sizes, strict=True)]
            await asyncio.sleep(0.5)
    except asyncio.CancelledError:
        return peaks


async def _most_live(deployment: Deployment, episodes: int) -> int:
    """Most episodes between their start and their end at one time, by the log."""
    changes: list[tuple[float, int]] = []
    async with deployment.following(OUTCOMES) as deliveries:
        async for delivery in deliveries:
            assert isinstance(delivery.event, EpisodeEnded)
            ended = delivery.recorded_at
            changes += [(ended - delivery.event.seconds, 1), (ended, -1)]
            if len(changes) == 2 * episodes:
                break
    most = live = 0
    for _, change in sorted(changes):
        live += change
        most = max(most, live)
    return most
