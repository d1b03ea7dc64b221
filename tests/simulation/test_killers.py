"""Agents whose code kills its process: their episodes end as poison, and all others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from schemas.events import EpisodeEnded
from schemas.recipe import Recipe
from services.agent.episode import Episode
from services.agent.isolation import DEATHS
from services.apply import lags
from tests.simulation import loop_child, virtual_time, world
from tests.simulation.history import History, read_history
from tests.simulation.processes import Run, this_process
from tests.simulation.test_flow import until_drained

KILLERS = {2, 7}
"""Numbers of the tasks whose agents kill."""
SETTLE_S = 200.0


async def agent(episode: Episode) -> None:
    """Kills its process after the first answer, where the task is one of KILLERS."""
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text)
        if episode.task.number in KILLERS:
            if (child := loop_child.child.get()) is not None:
                child.die()
            else:
                this_process().kill()
            await asyncio.Event().wait()
        observation = await episode.step(generation.text)


def recipe() -> Recipe:
    changes = {"agents": {"default": {"use": f"{__name__}:agent"}}}
    return Recipe.model_validate(world.recipe().model_dump() | changes)


async def play(folder: Path) -> tuple[History, int]:
    """A run to its end, and how often its agent workers were started."""
    run = Run(recipe(), folder)
    log = await run.start()
    await until_drained(log)
    await asyncio.sleep(SETTLE_S)
    await run.stop()
    history = await read_history(log, recipe())
    history.check()
    left = await lags(log.broker, log.topics)
    assert not any(left.values()), f"not done: {left}"
    return history, sum(one.starts for one in run.processes if one.service == "agent")


@pytest.mark.parametrize("seed", range(5))
def test_what_kills_its_worker_ends_as_poison_and_harms_no_other(tmp_path: Path, seed: int) -> None:
    history, starts = virtual_time.run(lambda: play(tmp_path), seed)
    ended = [one.event for one in history.facts.all(EpisodeEnded)]
    poison = Counter(one.task for one in ended if one.failure and one.failure.code == "poison")
    assert poison == dict.fromkeys(KILLERS, 3)
    assert history.endings() == {"poison": 6, "finished": 42}
    # Two workers; each task of KILLERS is found out by so many deaths, or with the other.
    assert starts <= 2 + len(KILLERS) * (DEATHS + 1)
