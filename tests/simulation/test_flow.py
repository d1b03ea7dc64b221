"""A whole run in memory, whose processes are killed and frozen: nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from schemas.topics import BATCHES, POLICIES, RESULTS, TASKS
from services.apply import lags
from services.kafka.broker import Partition
from services.log import EventLog
from tests.checker import read_all
from tests.simulation import virtual_time
from tests.simulation.history import History, drained, read_history
from tests.simulation.processes import Process, Run
from tests.simulation.world import recipe

BOUND_S = 120.0
"""Virtual seconds within which all is drained once the faults are over."""
SETTLE_S = 200.0
"""Virtual seconds until the deadline of what a zombie opened, and forgot, has passed too."""
ALL_FINISHED = {"finished": 48}


async def until_drained(log: EventLog) -> None:
    """Waits until nothing is left to do; TimeoutError after BOUND_S."""
    topics = log.topics
    watched = [Partition(topics.name(topic), 0) for topic in (TASKS, POLICIES)]
    watched.append(Partition(topics.name(BATCHES, "default"), 0))
    watched += [Partition(topics.name(RESULTS), n) for n in range(topics.partitions)]
    before: Any = None
    async with asyncio.timeout(BOUND_S):
        while True:
            ends = await log.broker.ends(watched)
            if ends != before and await drained(log, recipe()):
                return
            before = ends
            await asyncio.sleep(0.5)


def freeze(process: Process, seconds: float) -> None:
    """Stops a process for a while; it is a zombie then where that is longer than its sessions."""
    if (client := process.client) is not None:
        client.freeze()
        asyncio.get_running_loop().call_later(seconds, client.thaw)


async def faults(run: Run, chance: Random, *, kills: int, freezes: int) -> None:
    """Kills and freezes processes at moments of chance."""
    acts: list[Callable[[Process], None]] = [Process.kill] * kills
    acts += [lambda process: freeze(process, chance.choice([0.5, 8.0]))] * freezes
    chance.shuffle(acts)
    for act in acts:
        await asyncio.sleep(chance.uniform(0.0, 1.5))
        act(chance.choice(run.processes))


async def play(folder: Path, seed: int, *, kills: int = 0, freezes: int = 0) -> History:
    """A run to its end, faults included, and what the log says of it."""
    run = Run(recipe(), folder)
    log = await run.start()
    await faults(run, Random(seed), kills=kills, freezes=freezes)
    await until_drained(log)
    await asyncio.sleep(SETTLE_S)
    await run.stop()
    history = await read_history(log, recipe())
    history.check()
    left = await lags(log.broker, log.topics)
    assert not any(left.values()), f"not done: {left}"
    return history


def test_a_run_without_faults_writes_nothing_twice(tmp_path: Path) -> None:
    history = virtual_time.run(lambda: play(tmp_path, 0))
    assert history.endings() == ALL_FINISHED
    assert history.report.duplicates == {}
    assert history.report.trained > 0


def test_a_run_repeats_by_its_seed(tmp_path: Path) -> None:
    async def records() -> list[Any]:
        run = Run(recipe(), tmp_path)
        log = await run.start()
        await until_drained(log)
        deliveries, _ = await read_all(log)
        return sorted((one.partition, one.offset, one.ref.digest) for one in deliveries)

    first = virtual_time.run(records, 7)
    assert virtual_time.run(records, 7) == first
    assert virtual_time.run(records, 8) != first


@pytest.mark.parametrize("seed", range(20))
def test_kills_lose_nothing_and_cost_no_attempt(tmp_path: Path, seed: int) -> None:
    history = virtual_time.run(lambda: play(tmp_path, seed, kills=8), seed)
    assert history.endings() == ALL_FINISHED
    assert history.attempts_lost() == 0


@pytest.mark.parametrize("seed", range(10))
def test_zombies_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    history = virtual_time.run(lambda: play(tmp_path, seed, kills=3, freezes=5), seed)
    assert history.endings() == ALL_FINISHED
