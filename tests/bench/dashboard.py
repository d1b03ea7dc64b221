"""The dashboard over a large run: time to the first page, latencies, memory, and what a run loses.

The run is written, not played: 10,000 episodes with 5 million sampled tokens. For the loss, null
episodes are played without a pause, and the dashboard that follows them is stopped and continued
every few seconds. So both cases have the same log, the same warm processes and the same neighbours.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, pairwise
from statistics import mean, median, stdev
from typing import Any

import psutil

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import RESULTS
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.dashboard_child import variables_of
from headrace.services.operate.processes import headrace_command
from tests.bench.deployment import deployed
from tests.bench.episodes import SERVICES, TURNS, WARM_UP, Driver, null_recipe
from tests.bench.report import Figure
from tests.written_run import RunWriter, Size

TASKS, SAMPLES, WRITTEN_TURNS, TOKENS, GROUPS = 1_000, 10, 5, 100, 50
ASKED = 60
"""Pages of each kind that are opened."""
EPISODES, LIVE = 50_000, 128
WINDOW_S = 5.0
"""How long the dashboard works, and how long it is stopped."""
BOUND_S = 600.0


class Visitor:
    """Asks one dashboard, as a page does."""

    def __init__(self, url: str, process: psutil.Process, session: Any) -> None:
        self.process = process
        self._session = session
        self._base, _, token = url.partition("/?token=")
        self._headers = {"Authorization": f"Bearer {token}"}
        self.memory = 0
        """Most bytes in memory after a request."""

    async def get(self, path: str) -> tuple[Any, float]:
        """Returns the JSON of an answer, and the seconds that it took."""
        began = time.perf_counter()
        async with self._session.get(self._base + path, headers=self._headers) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {body[:300]!r}")
        seconds = time.perf_counter() - began
        self.memory = max(self.memory, self.process.memory_info().rss)
        return json.loads(body), seconds


@asynccontextmanager
async def visiting(cluster: ClusterConfig) -> AsyncIterator[Visitor]:
    """Starts a dashboard in a session of its own, as `run --dashboard` does, and ends it."""
    from aiohttp import ClientSession

    process = await asyncio.create_subprocess_exec(
        *headrace_command("dashboard", "--read-only"),
        env={**os.environ, **variables_of(cluster)},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        async with ClientSession() as session:
            yield Visitor(url, psutil.Process(process.pid), session)
    finally:
        process.terminate()
        await process.wait()


async def dashboard(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """All figures of the dashboard."""
    return [*await _large_run(cluster, scale), await _loss(cluster, scale)]


async def _large_run(cluster: ClusterConfig, scale: float) -> list[Figure]:
    recipe = Recipe.model_validate(
        {"name": "bench-dashboard", "policies": {"default": {"model": "tiny-llama"}}}
    )
    size = Size(max(20, int(TASKS * scale)), SAMPLES, WRITTEN_TURNS, TOKENS, GROUPS)
    episodes = size.tasks * size.samples
    async with deployed(cluster, recipe) as deployment:
        await RunWriter(deployment.log.send, size).write()
        began = time.perf_counter()
        async with visiting(deployment.cluster) as visitor:
            started_s = time.perf_counter() - began
            early = await _while_it_reads(visitor)
            index, _ = await visitor.get("/api/run")
            assert index["episodes"]["ended"] == episodes, index["episodes"]
            cpu_s = sum(visitor.process.cpu_times()[:2])
            figures = await _pages(visitor, size)
            memory = visitor.memory / 2**20
    what = f"{episodes:,} episodes, {index['episodes']['tokens']:,} tokens"
    note = (
        f"{index['index']['total']:,} offsets, {cpu_s:.1f} s CPU, process start {started_s:.1f} s"
    )
    return [
        Figure(f"dashboard: index of {what}", f"{index['index']['seconds']:.1f} s", note=note),
        Figure("  /api/run while it reads", _latency(early), "1 s"),
        *figures,
        Figure("  memory", f"{memory:.0f} MiB", "500 MiB"),
    ]


async def _while_it_reads(visitor: Visitor) -> list[float]:
    """Asks for the first page until the whole log is read."""
    times = []
    async with asyncio.timeout(BOUND_S):
        while True:
            tree, seconds = await visitor.get("/api/run")
            times.append(seconds)
            if tree["index"]["caught_up"]:
                return times
            await asyncio.sleep(0.2)


async def _pages(visitor: Visitor, size: Size) -> list[Figure]:
    source = random.Random(1)

    def episode() -> str:
        return f"{source.randrange(size.tasks)}/{source.randrange(size.samples)}"

    newest = (size.tasks + size.groups - 1) // size.groups
    kinds: dict[str, tuple[Callable[[], str], str]] = {
        "the run": (lambda: "/api/run", "1 s"),
        "its curves": (lambda: "/api/series?points=300", "1 s"),
        "by time": (lambda: "/api/times", "1 s"),
        "a trajectory": (lambda: f"/api/episodes/{episode()}", "0.5 s"),
        "its tokens": (lambda: f"/api/episodes/{episode()}/tokens", "0.5 s"),
        "a group": (lambda: f"/api/groups/{source.randrange(size.tasks)}", "0.5 s"),
        "a version": (lambda: f"/api/versions/default/{source.randint(1, newest)}", "0.5 s"),
        "a filtered list": (lambda: "/api/episodes?reward_min=1&tool=search", "0.5 s"),
    }
    figures = []
    for name, (path, bar) in kinds.items():
        times = [(await visitor.get(path()))[1] for _ in range(ASKED)]
        figures.append(Figure(f"  {name}", _latency(times), bar, note=f"{ASKED} requests"))
    _, seconds = await visitor.get("/api/episodes?text=nowhere-to-be-found")
    figures.append(Figure("  a text that no episode has", f"{seconds:.2f} s", note="of all texts"))
    return figures


def _latency(times: list[float]) -> str:
    return f"p50 {median(times) * 1000:.0f} ms, max {max(times) * 1000:.0f} ms"


async def _loss(cluster: ClusterConfig, scale: float) -> Figure:
    """Plays episodes without a pause, while the dashboard is stopped and continued in turns."""
    recipe = null_recipe({"turns": TURNS}, live=1024, turns=TURNS, seconds=120)
    ended: list[float] = []
    switched: list[tuple[float, bool]] = []
    async with deployed(cluster, recipe) as deployment:
        await deployment.publish_initial()
        driver = Driver(deployment)
        async with deployment.serving(*SERVICES), deployment.following(RESULTS) as results:
            await driver.run(results, WARM_UP, 16)
            async with visiting(deployment.cluster) as visitor:
                await _while_it_reads(visitor)
                switching = asyncio.create_task(_switch(visitor.process, switched))
                try:
                    await driver.run(results, max(64, int(EPISODES * scale)), LIVE, ended)
                finally:
                    switching.cancel()
                    visitor.process.resume()
    pairs = window_pairs(ended, switched)
    ratio, error = ratio_of_sums(pairs)
    return Figure(
        "episodes/s with a dashboard, relative to without",
        f"{ratio:.3f} ± {error:.3f}",
        "0.97",
        note=f"{len(pairs)} pairs of windows of {WINDOW_S:g} s with {len(ended):,} episodes, and "
        "the standard error",
    )


async def _switch(process: psutil.Process, switched: list[tuple[float, bool]]) -> None:
    """Continues and stops a process in turns without end, and notes when.

    Pairs after the first window alternate between both orders.
    """
    for works in cycle((True, True, False, False)):
        if works:
            process.resume()
        else:
            process.suspend()
        switched.append((time.time(), works))
        await asyncio.sleep(WINDOW_S)


def window_pairs(
    ended: Sequence[float], switched: Sequence[tuple[float, bool]]
) -> list[tuple[float, float]]:
    """Returns the episodes per second of neighbouring windows, with and without the dashboard.

    `ended` are the ends of episodes and `switched` the beginnings of windows, in seconds of one
    clock. The last window is not whole, and the first one belongs to the start.
    """
    rates = []
    for (began, works), (end, _) in pairwise(switched[1:]):
        rates.append((works, sum(began <= at < end for at in ended) / (end - began)))
    pairs = [dict(rates[at : at + 2]) for at in range(0, len(rates) - 1, 2)]
    return [(pair[True], pair[False]) for pair in pairs]


def ratio_of_sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the ratio of the sums of both sides, and its standard error (linearized).

    The mean of the pairs' own ratios would be too high, because a slow window that is by chance
    the divisor weighs more than one that is the dividend.
    """
    ratio = sum(one for one, _ in pairs) / sum(other for _, other in pairs)
    rests = [one - ratio * other for one, other in pairs]
    error = stdev(rests) / len(pairs) ** 0.5 / mean(other for _, other in pairs)
    return ratio, error
