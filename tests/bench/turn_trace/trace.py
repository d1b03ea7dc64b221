"""Follows null turns through agent, env, inference, scheduler and broker, 1 and 16 live at once.

It prints where the time of a turn went, stage by stage, and what each thread cost. Stamps are
notes in the memory of the services' processes, so they cost some microseconds each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from headrace.schemas.topics import RESULTS
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.cpu import CpuWatch
from tests.bench.deployment import deployed
from tests.bench.episodes import SERVICES, TURNS, Driver, null_recipe
from tests.bench.report import Figure, machine
from tests.bench.turn_trace.legs import STAGES, TracedTurn, medians, read_stamps, turns_of
from tests.bench.turn_trace.stamps import KINDS
from tests.bench.turn_trace.thread_cpu import Costs, since, thread_costs, total

WARM_UP = 200
"""Episodes that are not followed. A broker that has just started costs twice as much CPU."""
EPISODES = {1: 150, 16: 600}
"""How many are followed, by how many are live."""
SHOWN = 24
"""Threads in the table, the dearest ones."""


async def traced_turns(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Prints two tables for 1 and for 16 live episodes. Returns the median turns."""
    figures: list[Figure] = []
    console = Console(width=140)
    for live, count in EPISODES.items():
        episodes = max(8, int(count * scale))
        turns, costs = await _follow(cluster, live, episodes, max(4, int(WARM_UP * scale)))
        console.print(machine())
        console.print(_stage_table(live, turns))
        console.print(_thread_table(live, costs, episodes * TURNS))
        totals = quantiles([turn.total / 1e6 for turn in turns], n=20)
        cpu_us = total(costs.values()).cpu_ns / 1000 / (episodes * TURNS)
        note = f"{len(turns)} turns, p95 {totals[18]:.2f} ms, {cpu_us:,.0f} µs CPU a turn"
        figures.append(Figure(f"a traced turn, {live} live, p50", f"{totals[9]:.2f} ms", note=note))
    return figures


async def _follow(
    cluster: ClusterConfig, live: int, episodes: int, warm_up: int
) -> tuple[list[TracedTurn], Costs]:
    """Runs episodes. Returns their turns, and what each thread of the stack cost meanwhile."""
    recipe = null_recipe({"turns": TURNS}, live=1024, turns=TURNS, seconds=120)
    with TemporaryDirectory(prefix="headrace-trace-") as folder:

        def command(*arguments: str) -> tuple[str, ...]:
            file = Path(folder, f"{arguments[1]}.jsonl")
            return (sys.executable, "-m", "tests.bench.turn_trace", str(file), *arguments)

        async with deployed(cluster, recipe) as deployment:
            await deployment.publish_initial()
            driver = Driver(deployment)
            async with (
                deployment.serving(*SERVICES, command=command),
                deployment.following(RESULTS) as results,
            ):
                await driver.run(results, warm_up, min(16, warm_up))
                watched = CpuWatch(cluster.state).processes()
                pids = {name: process.pid for name, process in watched.items()}
                before = thread_costs(pids)
                _, numbers = await driver.run(results, episodes, live)
                costs = since(before, thread_costs(pids))
        times = read_stamps(Path(folder).iterdir())
    wanted = {str(number) for number in numbers}
    return list(turns_of({key: at for key, at in times.items() if _task(key[2]) in wanted})), costs


def _task(name: str) -> str:
    """The task of an event's id."""
    return name.partition("/")[0]


def _stage_table(live: int, turns: Sequence[TracedTurn]) -> Table:
    table = Table(
        "stage", *KINDS, "turn", title=f"{live} live: medians of {len(turns)} turns, microseconds"
    )
    for name, row in zip((*STAGES, "sum"), medians(turns), strict=True):
        table.add_row(name, *_numbers(row))
    sent = [median(turn.acknowledged[leg] for turn in turns) / 1000 for leg in range(4)]
    table.add_row("(sender goes on after)", *_numbers(sent))
    return table


def _thread_table(live: int, costs: Costs, turns: int) -> Table:
    titles = ("process", "thread", "CPU", "waited for a core", "runs")
    table = Table(*titles, title=f"{live} live: each turn costs, microseconds and runs")
    rows = [(*key, cost) for key, cost in list(costs.items())[:SHOWN]]
    for process in dict.fromkeys(process for process, _ in costs):
        rows.append((process, "all", total(c for (p, _), c in costs.items() if p == process)))
    rows.append(("all", "all", total(costs.values())))
    for process, thread, cost in rows:
        spent = (cost.cpu_ns / 1000 / turns, cost.waited_ns / 1000 / turns)
        table.add_row(process, thread, *_numbers(spent), f"{cost.runs / turns:.1f}")
    return table


def _numbers(values: Iterable[float]) -> list[str]:
    return [f"{value:,.0f}" for value in values]
