"""Agents whose code kills its process: their episodes end as poison, and all others go on."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from headrace.schemas.events import EpisodeEnded
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.crash_isolation.isolation import DEATHS
from headrace.services.agent.episode import Episode
from headrace.services.log.event_log import EventLog
from tests.simulation import loop_child
from tests.simulation.processes import Run, this_process
from tests.simulation.scenario import calm
from tests.simulation.simulate import simulate

KILLERS = {2, 7}
"""Numbers of the tasks whose agents kill."""


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


CROWDED = {
    "headrace.services.agent.crash_isolation.isolation:CHILDREN": 1,
    "headrace.services.agent.crash_isolation.isolation:TRIAL_S": 0.5,
    "headrace.services.agent.early_answers:KEPT_BYTES": 0,
}


@pytest.mark.parametrize("limits", [{}, CROWDED], ids=["roomy", "crowded"])
@pytest.mark.parametrize("seed", range(3))
def test_what_kills_its_worker_ends_as_poison_and_harms_no_other(
    seed: int, limits: dict[str, Any]
) -> None:
    scenario = calm()
    scenario.limits |= limits
    agents = {"agents": {"wanderer": {"use": f"{__name__}:agent"}}}
    scenario.recipe = Recipe.model_validate(scenario.recipe.model_dump() | agents)
    scenario.misbehaviour = frozenset({"agent kills"})
    starts = []

    async def count(run: Run, log: EventLog) -> None:
        starts.append(sum(one.starts for one in run.processes if one.service == "agent"))

    result = simulate(seed, scenario=scenario, afterwards=count)
    assert result.violations == []
    assert result.facts is not None
    ended = [one.event for one in result.facts.all(EpisodeEnded)]
    poison = Counter(one.task for one in ended if one.failure and one.failure.code == "poison")
    assert poison == dict.fromkeys(KILLERS, 3)
    assert result.endings == {"poison": 6, "finished": 42}
    # Two workers; each task of KILLERS is found out by so many deaths, or with the other.
    assert starts[0] <= 2 + len(KILLERS) * (DEATHS + 1)
