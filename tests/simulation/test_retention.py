"""Retention deletes records: what is done with is not missed, and what is needed is, loudly."""

from __future__ import annotations

import asyncio

from headrace.schemas.topics import EPISODES
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from tests.simulation.processes import Run
from tests.simulation.scenario import calm
from tests.simulation.simulate import simulate


def forget(run: Run) -> None:
    """Deletes all starts."""
    for number in range(run.topics.partitions):
        place = Partition(run.topics.name(EPISODES), number)
        run.expired += run.cluster.expire(place, run.cluster.state.log(place).end)


def test_a_source_goes_on_where_the_starts_of_finished_tasks_are_gone() -> None:
    async def outlive(run: Run, log: EventLog) -> None:
        await asyncio.sleep(2.0)
        (source,) = run.running("source")
        source.freeze()
        await asyncio.sleep(60.0)  # All that it submitted ends.
        forget(run)
        source.kill()

    scenario = calm()
    tasks = scenario.recipe.tasks.model_copy(update={"backlog": 1})
    scenario.recipe = scenario.recipe.model_copy(update={"tasks": tasks})
    result = simulate(0, scenario=scenario, meanwhile=outlive)
    assert result.violations == []
    assert result.endings == {"finished": 48}


def test_starts_that_are_deleted_before_they_are_run_are_missed_loudly() -> None:
    async def lose(run: Run, log: EventLog) -> None:
        for agent in run.running("agent"):
            await agent.stop()
        place = Partition(run.topics.name(EPISODES), 0)
        while (await log.broker.ends([place]))[place][1] == 0:
            await asyncio.sleep(0.5)
        forget(run)
        run.add("agent")

    (violation,) = simulate(0, scenario=calm(), meanwhile=lose).violations
    assert violation.startswith("RecordsLost: sim.episodes.v1/")
    assert "records are lost, offsets 0 to" in violation
