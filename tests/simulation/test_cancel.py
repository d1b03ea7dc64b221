"""Tasks are cancelled at moments of chance, amid kills: each ends once, none of them is trained."""

from __future__ import annotations

import asyncio

import pytest

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    GroupClosed,
    TaskCancelled,
    TaskEnded,
    TaskSubmitted,
)
from headrace.schemas.topics import TASKS
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import EventLog
from headrace.services.operate.verify.invariants.log_facts import Facts
from tests.simulation.judge import Result
from tests.simulation.processes import Run
from tests.simulation.scenario import calm
from tests.simulation.simulate import simulate
from tests.tiers import first_in_every_change

RECIPE = calm().recipe


def facts_of(result: Result) -> Facts:
    assert result.violations == []
    assert result.facts is not None
    return result.facts


def check_cancelled(facts: Facts) -> set[int]:
    """What must hold of cancelled tasks. Their numbers."""
    asked = {one.event.event_id for one in facts.all(TaskCancelled)}
    cancelled = {
        one.event.task for one in facts.all(TaskEnded) if one.event.closed_by == "cancelled"
    }
    for one in facts.all(TaskEnded):
        if one.event.task in cancelled:
            assert f"{one.event.source}/{one.event.task_id}" in asked
    for outcome in (one.event for one in facts.all(EpisodeEnded)):
        if outcome.ending == "cancelled":
            assert outcome.task in cancelled
            assert outcome.failure is not None
            assert (outcome.failure.code, outcome.failure.message) == ("cancelled", "by chance")
            assert outcome.reward is None
    for group in (one.event for one in facts.all(GroupClosed)):
        assert (group.reason == "cancelled") == (group.task in cancelled)
    for batch in facts.all(BatchAssembled):
        assert not cancelled & {sample.task for sample in batch.event.samples}
    return cancelled


@pytest.mark.parametrize("seed", first_in_every_change(range(4), 2))
def test_a_cancelled_task_ends_once_and_is_never_trained(seed: int) -> None:
    scenario = calm()
    scenario.pause_s = 0.8
    scenario.acts = ["cancel"] * 4 + (["kill", "cancel", "freeze"] * 4 if seed % 2 else [])
    result = simulate(seed, scenario=scenario)
    assert check_cancelled(facts_of(result))
    assert result.endings.keys() == {"finished", "cancelled"}


def test_what_is_cancelled_before_it_starts_is_not_run() -> None:
    async def cancel(run: Run, log: EventLog) -> None:
        place = Partition(log.topics.name(TASKS), 0)
        while (await log.broker.ends([place]))[place][1] < 1:
            await asyncio.sleep(0.01)
        (record,) = await log.broker.fetch([Position(place, 0)])
        task = (await log.decode(record)).event
        assert isinstance(task, TaskSubmitted)
        later = task.model_copy(update={"source": "team", "task_id": "later"})
        await log.send(TaskCancelled(source="team", task_id="later", reason="by chance"))
        await asyncio.sleep(1.0)
        await log.send(later)

    facts = facts_of(simulate(0, scenario=calm(), meanwhile=cancel))
    (number,) = check_cancelled(facts)
    starts = [one.event for one in facts.all(EpisodeStarted) if one.event.task == number]
    assert [start.verdict.code for start in starts if start.verdict] == ["cancelled"]
    assert len(starts) == 1


def test_the_source_goes_on_when_all_that_waits_is_cancelled() -> None:
    backlog = RECIPE.tasks.backlog

    async def cancel(run: Run, log: EventLog) -> None:
        # Before they are submitted, so that none of them starts.
        for task in [f"0-{number}" for number in range(backlog)]:
            await log.send(TaskCancelled(source="source", task_id=task, reason="by chance"))

    result = simulate(0, scenario=calm(), meanwhile=cancel)
    assert len(check_cancelled(facts_of(result))) == backlog
    assert result.endings["finished"] == 3 * (RECIPE.tasks.options["items"] - backlog)
