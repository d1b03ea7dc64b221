"""Versions are evaluated as they learn, amid kills: pinned, whole, and never trained on."""

from __future__ import annotations

import pytest

from headrace.schemas.events import EpisodeStarted, GroupClosed, TaskEnded, TrajectoryRecorded
from headrace.services.operate.evaluation import Evaluations
from headrace.services.operate.verify.invariants.log_facts import Facts
from tests.simulation.scenario import Scenario, calm, draw_only
from tests.simulation.simulate import simulate
from tests.tiers import first_in_every_change

EVERY, ITEMS, SAMPLES = 2, 3, 4
KILLS = ("kill", "scheduler", "agent", "env", "inference", "aimed")


def evaluating(scenario: Scenario, **changes: int) -> Scenario:
    """The scenario with an evaluation of its versions."""
    evaluation = {"every": EVERY, "items": ITEMS, "samples": SAMPLES, "temperature": 0.0}
    limits = scenario.recipe.scheduler.model_copy(update={"evaluation_episodes": 5})
    tree = scenario.recipe.model_dump(mode="json") | {"evaluation": evaluation | changes}
    tree["scheduler"] = limits.model_dump(mode="json")
    scenario.recipe = type(scenario.recipe).model_validate(tree)
    scenario.processes = {**scenario.processes, "evaluation": 1}
    return scenario


def facts_of(seed: int, scenario: Scenario) -> Facts:
    result = simulate(seed, scenario=scenario)
    assert result.violations == []  # among them: what evaluates is pinned, and never trained on
    assert result.facts is not None
    return result.facts


def test_every_second_version_is_evaluated_as_it_was() -> None:
    facts = facts_of(1, evaluating(calm()))
    evaluations = Evaluations()
    for one in facts.events(TaskEnded):
        evaluations.on_task_ended(one)
    measured = evaluations.of("default")
    assert len(measured) >= 2
    assert all(version % EVERY == 0 for version in measured)
    assert {len(one.rewards) for one in measured.values()} == {ITEMS}
    assert {(one.asked, one.failed) for one in measured.values()} == {(SAMPLES, 0)}
    ours = [one for one in facts.events(GroupClosed) if one.reason == "evaluate"]
    assert len(ours) == ITEMS * len(measured)
    samplings = {
        sampling.temperature
        for one in facts.events(TrajectoryRecorded)
        if one.purpose == "evaluate"
        for sampling in one.samplings
    }
    assert samplings == {0.0}


@pytest.mark.parametrize("seed", first_in_every_change(range(3)))
def test_evaluations_come_through_kills(seed: int) -> None:
    facts = facts_of(seed, evaluating(draw_only(seed, KILLS)))
    starts = [one for one in facts.events(EpisodeStarted) if one.submitted.purpose == "evaluate"]
    assert starts
    ended = [one for one in facts.events(TaskEnded) if one.purpose == "evaluate"]
    assert {one.closed_by for one in ended} == {"all"}
