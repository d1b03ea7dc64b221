"""`python -m tests.bench.growth [NAME...]`: does what an item costs stay the same in large runs?

Four costs, each while one number grows. All else stays as it is, so a flat line is right:

- `live`: the CPU time of a null episode, from 100 to 10,000 live ones.
- `partitions`: the CPU time of an event, from 1 to 64 partitions of every topic.
- `decided`: the CPU time to assemble a batch, from 1,000 to 1,000,000 decided tasks. Without Kafka.
- `restart`: the time from `kill -9` of all services, or of both stream jobs, until they have worked
  again, from 10,000 to 1,000,000 records in the log. With `--scale 10` up to ten million.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    BatchAssembled,
    Blob,
    EpisodeStarted,
    GroupClosed,
    GroupSample,
    PolicyPublished,
    Ref,
    TaskSubmitted,
)
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES, RESULTS
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.stream_jobs.batches import BatchAssembler
from tests.bench.cpu import CpuWatch
from tests.bench.deployment import Deployment, a_stack, deployed
from tests.bench.episodes import SERVICES, TURNS, WARM_UP, Driver, null_recipe
from tests.bench.report import Figure, print_figures, stoppable
from tests.bench.trajectories import GROUPS_A_BATCH, JOBS, pipeline_recipe, publish_start
from tests.bench.work import Producer

LIVE = (100, 1_000, 10_000)
PARTITIONS = (1, 4, 16, 64)
DECIDED = (1_000, 10_000, 100_000, 1_000_000)
RECORDS = (10_000, 100_000, 1_000_000)
EPISODE_RECORDS, BATCH_RECORDS = 23, 16 * 18
"""About so many records an episode of four turns has, and a batch with its trajectories."""
SHORT_TOKENS = 16
"""Tokens of a trajectory if only the number of records counts."""
BOUND_S = 3_600.0


@dataclass(frozen=True)
class Series:
    """One cost, while a number grows."""

    what: str
    unit: str
    over: str
    """What grows."""
    points: list[tuple[int, float]] = field(default_factory=list)

    def add(self, number: int, cost: float) -> None:
        """Notes a cost, and shows it."""
        self.points.append((number, cost))
        print(f"{self.what}, {number:,} {self.over}: {cost:.3g} {self.unit}", flush=True)

    def figures(self) -> list[Figure]:
        """A line for each point. The last one says how much more it costs than the first."""
        figures = [
            Figure(f"{self.what}, {number:,} {self.over}", f"{cost:.3g} {self.unit}")
            for number, cost in self.points
        ]
        ratio = self.points[-1][1] / self.points[0][1]
        return [*figures, Figure("  … the last, of the first", f"{ratio:.2f} times")]


async def live(cluster: ClusterConfig, scale: float) -> list[Series]:
    """CPU time of an episode, by how many are live."""
    series = Series("an episode", "ms CPU", "live")
    for number in (max(1, int(one * scale)) for one in LIVE):
        recipe = _null_recipe(number)
        async with deployed(cluster, recipe) as deployment:
            await deployment.publish_initial()
            driver = Driver(deployment)
            async with deployment.serving(*SERVICES), deployment.following(RESULTS) as results:
                await driver.run(results, WARM_UP, 16)
                # Half of them begin while others end, as in a long run.
                count = max(1_000, 2 * number)
                cpu = CpuWatch(cluster.state)
                await driver.run(results, count, number)
                series.add(number, cpu.seconds() * 1000 / count)
    return [series]


async def partitions(cluster: ClusterConfig, scale: float) -> list[Series]:
    """CPU time of an event, by the partitions of its topic, with 64 and with 1,024 live episodes.

    With few live episodes and many partitions, no two records have the same partition at a time.
    """
    return [await _by_partitions(cluster, number, scale) for number in (64, 1_024)]


async def _by_partitions(cluster: ClusterConfig, live: int, scale: float) -> Series:
    series = Series(f"an event, {live:,} live", "ms CPU", "partitions")
    count = max(live, int((1_500 + live) * scale))
    for number in PARTITIONS:
        tree = _null_recipe(live).model_dump(mode="json", exclude_unset=True)
        recipe = Recipe.model_validate({**tree, "partitions": number, "pool_partitions": number})
        async with deployed(cluster, recipe) as deployment:
            await deployment.publish_initial()
            driver = Driver(deployment)
            async with deployment.serving(*SERVICES), deployment.following(RESULTS) as results:
                await driver.run(results, WARM_UP, 16)
                before, cpu = await _records(deployment), CpuWatch(cluster.state)
                await driver.run(results, count, live)
                spent = cpu.seconds()
                series.add(number, spent * 1000 / (await _records(deployment) - before))
    return series


async def decided(cluster: ClusterConfig, scale: float) -> list[Series]:
    """Time and size of a batch, by the tasks that were decided before it."""
    times, sizes = (
        Series("to assemble a batch", "ms CPU", "decided tasks"),
        Series("a batch's record", "KB", "decided tasks"),
    )
    wanted = deque(sorted({max(500, int(one * scale)) for one in DECIDED}))
    most, taken = wanted[-1], _Batches()
    codec = Codec()
    codec.register(BatchAssembled, 1)
    recent: deque[tuple[float, int]] = deque(maxlen=30)
    while wanted:
        seconds, batch = taken.next_batch(most)
        recent.append((seconds, len(codec.encode(batch))))
        if taken.decided >= wanted[0]:
            number = wanted.popleft()
            times.add(number, fmean(one for one, _ in recent) * 1000)
            sizes.add(number, fmean(size for _, size in recent) / 1000)
    return [times, sizes]


async def restart(cluster: ClusterConfig, scale: float) -> list[Series]:
    """Time from `kill -9` until all works again, by the records of the log."""
    wanted = sorted({max(2_000, int(one * scale)) for one in RECORDS})
    return [
        await _restart_services(cluster, wanted),
        await _restart_jobs(cluster, wanted),
    ]


async def _restart_services(cluster: ClusterConfig, wanted: Sequence[int]) -> Series:
    """Agent, env, inference and scheduler, until 16 new episodes have ended."""
    series = Series("all services are back", "s", "records")
    async with (
        deployed(cluster, _null_recipe(256)) as deployment,
        deployment.following(RESULTS) as results,
        asyncio.timeout(BOUND_S),
    ):
        await deployment.publish_initial()
        driver = Driver(deployment)
        for number in wanted:
            async with deployment.serving(*SERVICES):
                while (missing := number - await _records(deployment)) > 0:
                    await driver.run(results, missing // EPISODE_RECORDS + 16, 256)
                began = _kill(cluster, SERVICES)
            async with deployment.serving(*SERVICES):
                await driver.run(results, 16, 16)
                series.add(number, time.perf_counter() - began)
    return series


async def _restart_jobs(cluster: ClusterConfig, wanted: Sequence[int]) -> Series:
    """assemble-groups and assemble-batches, until they have made a batch of new results."""
    series = Series("both stream jobs are back", "s", "records")
    async with (
        deployed(cluster, pipeline_recipe()) as deployment,
        deployment.following(BATCHES, "default") as batches,
        asyncio.timeout(BOUND_S),
    ):
        await publish_start(deployment)
        producer, made = Producer(deployment.log, SHORT_TOKENS), 0

        async def make_batches(count: int) -> None:
            """Ends the tasks of so many batches, and waits for the last one."""
            nonlocal made
            await producer.run(made * GROUPS_A_BATCH, count * GROUPS_A_BATCH)
            made += count
            async for delivery in batches:
                assert isinstance(delivery.event, BatchAssembled)
                if delivery.event.version >= made:
                    break

        for number in wanted:
            async with deployment.serving(*JOBS):
                while (missing := number - await _records(deployment)) > 0:
                    await make_batches(min(missing // BATCH_RECORDS + 1, 1_000))
                began = _kill(cluster, JOBS)
            async with deployment.serving(*JOBS):
                await make_batches(1)
                series.add(number, time.perf_counter() - began)
    return series


def _kill(cluster: ClusterConfig, services: Sequence[str]) -> float:
    """Kills services with `kill -9`. Returns when, by the performance counter."""
    processes = CpuWatch(cluster.state).processes()
    began = time.perf_counter()
    for service in services:
        processes[service].kill()
    return began


async def _records(deployment: Deployment) -> int:
    """How many records all topics of the namespace have had, marks of transactions included."""
    all_partitions = [one for topic in deployment.log.topics for one in topic.all_partitions()]
    return sum(end for _, end in (await deployment.log.broker.ends(all_partitions)).values())


def _null_recipe(live: int) -> Recipe:
    """The null recipe, in which all live episodes may ask at once."""
    recipe = null_recipe({"turns": TURNS}, live=live, turns=TURNS, seconds=600)
    tree = recipe.model_dump(mode="json", exclude_unset=True)
    tree["policies"]["default"]["engine"]["slots"] = live
    return Recipe.model_validate(tree)


class _Batches:
    """An assembler, and the groups of a long run.

    Groups of eight close in a random order within some hundred tasks. One of a hundred closes 2,000
    tasks later, and one of a thousand 20,000 tasks later.
    """

    def __init__(self) -> None:
        self._assembler = BatchAssembler(pipeline_recipe(), "default")
        self._assembler.on_policy(PolicyPublished(
            policy="default", version=0, status="initial", digest=bytes(32),
            full=Blob(sha256=bytes(32), size=0), full_version=0,
        ))  # fmt: skip
        self._chance = random.Random(0)
        self._task = self._offset = 0
        self._late: dict[int, list[int]] = {}
        self.decided = 0

    def next_batch(self, most: int) -> tuple[float, BatchAssembled]:
        """Returns a batch, and the seconds that the assembler took for it."""
        took = 0.0
        while True:
            task, self._task = self._task, self._task + 1
            delay = self._chance.choices((self._chance.randrange(500), 2_000, 20_000), (989, 10, 1))
            self._late.setdefault(task + delay[0], []).append(task)
            groups = [_group(one) for one in self._late.pop(task, ())]
            started = _start(task)
            began = time.process_time()
            self._assembler.on_start(started, 0.0)
            for group in groups:
                self._assembler.on_group(group, self._offset)
                self._offset += 1
            batch = self._assembler.next_batch(0.0) if groups else None
            if batch is not None:
                self._assembler.on_batch(batch)
            took += time.process_time() - began
            if batch is not None:
                self.decided += GROUPS_A_BATCH
                return took, batch


_SUBMITTED = TaskSubmitted(
    source="bench", task_id="0", item_id="0", agent="default", samples=8, roles={},
    max_turns=1, max_tokens=1024, deadline_s=600,
)  # fmt: skip
_STARTED = EpisodeStarted(task=0, sample=0, submitted=_SUBMITTED, seed=0, deadline=2**40)
_GROUP = GroupClosed(
    task=0, policy="default", item_id="0", verdict="scored", mean=0.5, deviation=0.5,
    samples=tuple(
        GroupSample(
            sample=sample, trajectory=Ref(topic="t", partition=0, offset=sample, digest=bytes(16)),
            reward=0.0, advantages=pack_f32([1.0]), tokens=1024, longest=1025, oldest_version=0,
        )
        for sample in range(8)
    ),
)  # fmt: skip


def _start(task: int) -> EpisodeStarted:
    return _STARTED.model_copy(update={"task": task})


def _group(task: int) -> GroupClosed:
    return _GROUP.model_copy(update={"task": task})


Measure = Callable[[ClusterConfig, float], Coroutine[Any, Any, list[Series]]]
COSTS: dict[str, Measure] = {
    "live": live, "partitions": partitions, "decided": decided, "restart": restart,
}  # fmt: skip


def draw(series: Sequence[Series], path: Path) -> None:
    """Draws a panel for each series, with a cost axis that begins at 0."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(4.0 * len(series), 3.0), layout="constrained")
    for number, one in enumerate(series, 1):
        axes = drawing.add_subplot(1, len(series), number)
        axes.plot(*zip(*one.points, strict=True), marker="o")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.3 * max(cost for _, cost in one.points))
        axes.set_title(f"{one.what} ({one.unit})", fontsize="medium")
        axes.set_xlabel(one.over, fontsize="small")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace"}):
        drawing.savefig(path, metadata={"Date": None})


@stoppable()
def main() -> None:
    """Measures what was asked for, all without a name."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COSTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers; default 1")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the costs into this file")
    options = parser.parse_args()
    if unknown := set(options.names) - COSTS.keys():
        parser.error(f"no cost {', '.join(sorted(unknown))}: choose from {', '.join(COSTS)}")
    series: list[Series] = []
    with a_stack() as cluster:
        for name in options.names or COSTS:
            series += asyncio.run(COSTS[name](cluster, options.scale))
    print_figures([figure for one in series for figure in one.figures()])
    if options.svg is not None:
        draw(series, options.svg)


if __name__ == "__main__":
    main()
