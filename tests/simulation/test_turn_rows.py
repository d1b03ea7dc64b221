"""Each turn of each episode that counts has its rows, amid kills: none is lost, and all agree."""

from __future__ import annotations

import pytest

from headrace.schemas.events import GroupClosed, TaskEnded, TrajectoryRecorded, TurnProjected
from headrace.schemas.packed import unpack_f32, unpack_i32
from headrace.services.operate.verify.invariants.log_facts import Facts
from tests.simulation.scenario import Scenario, calm, draw_only
from tests.simulation.simulate import simulate
from tests.tiers import first_in_every_change

KILLS = ("kill", "rebalance", "repeat", "aimed")
JOB = "project-turns"


def facts_of(seed: int, scenario: Scenario, jobs: int) -> Facts:
    scenario.processes = {**scenario.processes, JOB: jobs}
    scenario.victims = (JOB,)
    result = simulate(seed, scenario=scenario)
    assert result.violations == []
    assert result.facts is not None
    assert jobs == 1 or result.faults.total() > 0
    return result.facts


def check(facts: Facts) -> None:
    """Every turn that counts has a row with its numbers."""
    rows: dict[str, TurnProjected] = {}
    for row in facts.events(TurnProjected):
        assert rows.setdefault(row.event_id, row) == row
    taken = {(one.task, one.sample, one.attempt): one for one in facts.events(TrajectoryRecorded)}
    groups = {one.task: one for one in reversed(list(facts.events(GroupClosed)))}
    results = {one.task: one for one in reversed(list(facts.events(TaskEnded)))}
    expected = 0
    for ended in results.values():
        for outcome in ended.outcomes:
            if outcome.trajectory is None:
                continue
            trajectory = taken[ended.task, outcome.sample, outcome.attempt]
            samples = {one.sample: one for one in groups[ended.task].samples}
            for index, turn in enumerate(trajectory.turns):
                name = f"{ended.task}/{outcome.sample}/{trajectory.attempt}/{index}/0"
                row = rows[name]
                expected += 1
                assert list(row.tokens) == unpack_i32(turn.tokens)
                assert list(row.logprobs) == unpack_f32(turn.logprobs)
                assert (row.reward, row.ending) == (outcome.reward, outcome.ending)
                learned = samples.get(outcome.sample)
                assert (row.advantage is not None) == (learned is not None and turn.trainable)
    assert len(rows) == expected > 0


def test_every_turn_has_a_row() -> None:
    check(facts_of(1, calm(), jobs=1))


@pytest.mark.parametrize("seed", first_in_every_change(range(4)))
def test_a_dead_job_loses_no_row(seed: int) -> None:
    check(facts_of(seed, draw_only(seed, KILLS), jobs=2))
