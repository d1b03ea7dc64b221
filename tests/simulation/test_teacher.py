"""A teacher scores what is sampled, amid kills: every sample of a batch has its own scores."""

from __future__ import annotations

import pytest

from headrace.schemas.events import (
    EpisodeEnded,
    GenerationCompleted,
    GenerationRequested,
    TrajectoryRecorded,
)
from headrace.services.operate.verify.invariants.log_facts import Facts
from tests.simulation.scenario import calm, draw_only
from tests.simulation.simulate import simulate
from tests.simulation.teaching import TEACHER, with_teacher
from tests.tiers import first_in_every_change

KILLS = ("kill", "agent", "inference", "aimed", TEACHER)


def facts_of(seed: int, *kinds: str) -> Facts:
    scenario = draw_only(seed, kinds) if kinds else calm()
    scenario.recipe = with_teacher(scenario.recipe)
    result = simulate(seed, scenario=scenario)
    assert result.violations == []  # among them: scores that no teacher gave, or that are absent
    assert result.facts is not None
    return result.facts


def scored(facts: Facts) -> list[GenerationRequested]:
    return [one for one in facts.events(GenerationRequested) if one.kind == "score"]


def test_each_episode_is_scored_once() -> None:
    facts = facts_of(1)
    trajectories = list(facts.events(TrajectoryRecorded))
    assert len(trajectories) == len(scored(facts)) > 0
    assert all(turn.teacher for one in trajectories for turn in one.turns)
    scores = {turn.teacher for one in trajectories for turn in one.turns}
    assert len(scores) > len(trajectories)  # no two are alike


@pytest.mark.parametrize("seed", first_in_every_change(range(4)))
def test_scores_come_through_kills(seed: int) -> None:
    facts = facts_of(seed, *KILLS)
    assert scored(facts)
    assert {one.ending for one in facts.events(EpisodeEnded)} == {"finished"}


def test_failed_scores_are_asked_again_amid_limits_and_demonstrations() -> None:
    answers = [
        one
        for seed in (6, 9)
        for one in facts_of(seed, "engine fails", "limits", "demonstrations", TEACHER).events(
            GenerationCompleted
        )
    ]
    failed = {one.call for one in answers if one.failure is not None}
    assert any(call.endswith(".score0") for call in failed)
    assert any(one.call.endswith(".score1") and one.logprobs for one in answers)
