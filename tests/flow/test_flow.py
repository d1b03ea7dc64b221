"""A whole run in memory, whose processes are killed and frozen: nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from schemas.recipe import Recipe
from schemas.topics import BATCHES, POLICIES, RESULTS, TASKS
from services.apply import lags
from services.kafka.broker import Partition
from services.log import EventLog
from tests.flow import virtual_time
from tests.flow.history import attempts_lost, check, drained, endings, read_history
from tests.flow.processes import Run
from tests.flow.world import recipe_tree

BOUND_S = 120.0
"""Virtual seconds within which all is drained once the faults are over."""


SETTLE_S = 15.0
"""Virtual seconds until silent members are expelled, and their partitions read anew."""


async def until_drained(log: EventLog, recipe: Recipe) -> None:
    """Waits until nothing is left to do."""
    topics = log.topics
    watched = [Partition(topics.name(topic), 0) for topic in (TASKS, POLICIES)]
    watched.append(Partition(topics.name(BATCHES, "default"), 0))
    watched += [Partition(topics.name(RESULTS), n) for n in range(topics.partitions)]
    before: Any = None
    while True:
        await asyncio.sleep(0.5)
        ends = await log.broker.ends(watched)
        if ends != before and drained(await read_history(log), recipe):
            return
        before = ends


async def faults(run: Run, chance: Random, *, kills: int, freezes: int) -> None:
    """Kills and freezes processes at moments of chance."""
    acts = ["kill"] * kills + ["freeze"] * freezes
    chance.shuffle(acts)
    for act in acts:
        await asyncio.sleep(chance.uniform(0.0, 1.5))
        process = chance.choice(run.processes)
        if process.client is None:
            continue
        if act == "kill":
            process.kill()
        else:
            client = process.client
            client.freeze()
            loop = asyncio.get_running_loop()
            loop.call_later(chance.choice([0.5, 8.0]), client.thaw)


async def play(folder: Path, seed: int, *, kills: int = 0, freezes: int = 0) -> dict[str, Any]:
    recipe = Recipe.model_validate(recipe_tree())
    run = Run(recipe, folder)
    log = await run.start()
    await faults(run, Random(seed), kills=kills, freezes=freezes)
    async with asyncio.timeout(BOUND_S):
        await until_drained(log, recipe)
    await asyncio.sleep(SETTLE_S)
    await run.stop()
    history = await read_history(log)
    await check(history, log, recipe)
    assert not any((await lags(log.broker, log.topics)).values())
    return {"endings": endings(history), "attempts_lost": attempts_lost(history)}


def test_a_run_without_faults_costs_no_attempt(tmp_path: Path) -> None:
    found = virtual_time.run(lambda: play(tmp_path, 0))
    assert found == {"endings": {"finished": 48}, "attempts_lost": 0}


def test_a_run_repeats_by_its_seed(tmp_path: Path) -> None:
    async def records() -> list[Any]:
        recipe = Recipe.model_validate(recipe_tree())
        run = Run(recipe, tmp_path)
        log = await run.start()
        await until_drained(log, recipe)
        history = await read_history(log)
        return sorted((one.partition, one.offset, one.ref.digest) for one in history.deliveries)

    assert virtual_time.run(records, 7) == virtual_time.run(records, 7)


@pytest.mark.parametrize("seed", range(20))
def test_kills_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    found = virtual_time.run(lambda: play(tmp_path, seed, kills=8), seed)
    assert found["endings"] == {"finished": 48}


@pytest.mark.parametrize("seed", range(10))
def test_zombies_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    virtual_time.run(lambda: play(tmp_path, seed, kills=3, freezes=5), seed)
