"""The benchmarks run, at a tiny size. What they measure is nobody's business here."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.infra.local import LocalStack
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.growth import decided, draw, restart
from tests.bench.head import measure_head
from tests.bench.item_recovery import item_recovery
from tests.bench.report import machine
from tests.bench.trajectories import durable_trajectories
from tests.bench.weights import measure


@pytest.mark.long
def test_trajectories_pass_from_producer_to_decoded_batch(local_stack: LocalStack) -> None:
    cluster = ClusterConfig(Path(local_stack.state)).connected(
        local_stack.bootstrap_servers, local_stack.registry_url
    )
    figures = asyncio.run(durable_trajectories(cluster, scale=0.01))
    assert [figure.what.strip() for figure in figures] == [
        "produce alone",
        "assemble groups and batches alone",
        "fetch and decode alone",
        "durable trajectories/s, 1 assemble-groups",
        "durable trajectories/s, 2 assemble-groups",
    ]
    assert all(figure.value.endswith("/s") for figure in figures)
    assert "cores" in machine()


@pytest.mark.long
def test_the_statistics_of_items_are_recovered_after_a_kill(local_stack: LocalStack) -> None:
    """The benchmark itself compares each item with a fold that nothing has disturbed."""
    cluster = ClusterConfig(Path(local_stack.state)).connected(
        local_stack.bootstrap_servers, local_stack.registry_url
    )
    figures = asyncio.run(item_recovery(cluster, scale=0.002))
    assert [figure.value for figure in figures[-1:]] == ["2,201"]


@pytest.mark.long
def test_services_and_jobs_come_back_with_longer_logs(local_stack: LocalStack) -> None:
    cluster = ClusterConfig(Path(local_stack.state)).connected(
        local_stack.bootstrap_servers, local_stack.registry_url
    )
    for series in asyncio.run(restart(cluster, scale=0.003)):
        assert [number for number, _ in series.points] == [2_000, 3_000]


def test_a_batch_says_as_much_after_many_tasks_and_the_costs_are_drawn(tmp_path: Path) -> None:
    times, sizes = asyncio.run(decided(ClusterConfig(tmp_path), scale=0.005))
    assert [number for number, _ in times.points] == [500, 5_000]
    assert sizes.points[1][1] < 1.2 * sizes.points[0][1]
    draw([times, sizes], tmp_path / "costs.svg")
    assert "decided tasks" in (tmp_path / "costs.svg").read_text()


def test_deltas_are_received_bit_by_bit() -> None:
    figures = measure(scale=0.05)
    assert [figure.what for figure in figures[::3]] == [
        "delta at learning rate 1e-06",
        "delta at learning rate 5e-06",
    ]
    assert all(figure.value.endswith("times smaller") for figure in figures[::3])


def test_the_head_in_chunks_has_the_gradients_of_one_softmax() -> None:
    memory, difference, cpu = measure_head(tokens=64, vocabulary=600_000, width=16, rounds=1)
    assert float(memory.value.split()[0]) < 3.0 < float(memory.note.split()[3].rstrip(";"))
    assert float(difference.value) < 1e-5
    assert float(cpu.value) > 0


@pytest.mark.parametrize("work", ["await asyncio.sleep(60)", "while True: pass"])
def test_sigterm_ends_a_benchmark_and_leaves_nothing(work: str) -> None:
    code = f"""
import asyncio
from tests.bench.report import stoppable

async def benchmark():
    try:
        print("begun", flush=True)
        {work}
    finally:
        await asyncio.sleep(0)
        print("undone", flush=True)

with stoppable():
    asyncio.run(benchmark())
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (1, "undone\n")
    assert errors == "the benchmark was stopped before its end\n"
