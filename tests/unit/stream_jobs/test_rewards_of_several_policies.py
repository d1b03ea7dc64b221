"""The rewards of steps, as the turns of each of several policies get them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import EpisodeEnded
from headrace.schemas.packed import pack_f32, pack_i32, unpack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.verify.invariants.group_checks import _expected
from headrace.stream_jobs.advantages import TurnAdvantage
from headrace.stream_jobs.groups import GroupAssembler
from tests.unit.stream_jobs.test_groups import RECORDED_MS, a_task, an_outcome
from tests.unit.stream_jobs.test_role_rewards import a_use

POLICIES = {"plan": "planner", "code": "coder", "test": "coder", "rival": "coder"}
"""Each role's policy. The rival is of a pinned version."""
RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "tasks": {"roles": POLICIES},
        "policies": {
            name: {
                "model": "tiny-llama",
                "groups": {"advantage": f"{__name__}:Given"},
            }
            for name in ("planner", "coder")
        },
    }
)
ROUNDS = ("plan", "code") * 3
Played = Sequence[tuple[str, float]]
"""The role of each turn, and the reward that followed it; NaN for none."""
PLAYED = st.lists(
    st.tuples(st.sampled_from(list(POLICIES)), st.sampled_from([nan, 0.0, 0.1, 0.3, 1.0, -1.0])),
    min_size=1,
    max_size=12,
)


def played(turns: Played, reward: float, sample: int = 0, **changes: Any) -> EpisodeEnded:
    uses = tuple(
        a_use(
            POLICIES[role],
            role,
            tokens=0 if role == "rival" else 5,
            turns=pack_i32([index for index, one in enumerate(turns) if one[0] == role]),
            turn_rewards=pack_f32([one[1] for one in turns if one[0] == role]),
        )
        for role in dict.fromkeys(role for role, _ in turns)
    )
    return an_outcome(sample, reward, policies=uses, **changes)


def changed(outcome: EpisodeEnded, **changes: bytes) -> EpisodeEnded:
    uses = tuple(use.model_copy(update=changes) for use in outcome.policies)
    return outcome.model_copy(update={"policies": uses})


def rewards_of_turns(outcome: EpisodeEnded) -> dict[str, list[float]]:
    groups = GroupAssembler(RECIPE).on_task(a_task([outcome]), RECORDED_MS)
    return {
        group.policy: unpack_f32(sample.advantages) for group in groups for sample in group.samples
    }


@pytest.mark.parametrize(
    ("given", "planner"),
    [
        ([nan, 1.0, nan, 0.0, nan, 0.0], [1.0, 0.0, 0.0]),
        ([nan, 0.0, nan, 1.0, nan, 0.0], [0.0, 1.0, 0.0]),
        ([0.25, 0.5, nan, nan, nan, 0.25], [0.75, 0.0, 0.25]),
        ([nan, 0.5, nan, nan, nan, nan], [0.5, 0.0, 0.5]),  # a judge gave the rest
    ],
)
def test_a_turn_gets_what_came_before_its_policys_next_turn(
    given: list[float], planner: list[float]
) -> None:
    found = rewards_of_turns(played(list(zip(ROUNDS, given, strict=True)), 1.0))
    assert found["planner"] == planner


def test_what_came_before_a_policys_first_turn_counts_for_that_turn_alone() -> None:
    turns = [("plan", 1.0), ("code", 0.0), ("plan", nan), ("code", 0.5)]
    assert rewards_of_turns(played(turns, 1.5))["coder"] == [1.0, 0.5]


def test_the_turn_of_a_pinned_version_leaves_its_reward_to_the_turn_before() -> None:
    turns = [("code", nan), ("rival", 1.0), ("code", nan), ("rival", 0.0)]
    assert rewards_of_turns(played(turns, 1.0))["coder"] == [1.0, 0.0, 0.0, 0.0]


def test_a_role_with_a_reward_of_its_own_gets_none_of_what_followed_others() -> None:
    turns = list(zip(ROUNDS, [nan, 1.0, nan, 0.0, 0.25, 0.0], strict=True))
    outcome = played(turns, 1.0, rewards={"plan": 0.5})
    assert rewards_of_turns(outcome)["planner"] == [0.0, 0.0, 0.5]


def test_records_of_older_versions_are_read() -> None:
    """They don't say which turns are whose, so the last turn gets the rest."""
    whole = played(list(zip(ROUNDS, [nan, 1.0, nan, 0.0, nan, 0.0], strict=True)), 1.0)
    assert rewards_of_turns(changed(whole, turns=b""))["planner"] == [0.0, 0.0, 1.0]


def test_a_record_without_rewards_of_turns_has_the_episodes_alone() -> None:
    whole = played([("plan", nan), ("code", 1.0)], 1.0)
    assert rewards_of_turns(changed(whole, turn_rewards=b"")) == {"planner": [1.0], "coder": [1.0]}


def test_an_absurd_reward_excludes_the_sample_for_each_policy() -> None:
    turns = [("plan", float("inf")), ("code", float("-inf")), ("plan", 0.0)]
    assert rewards_of_turns(played(turns, 1.0)) == {}


@given(PLAYED, st.sampled_from([0.0, 0.7, -2.0]))
def test_the_return_of_a_turn_is_all_that_came_after_it(turns: Played, rest: float) -> None:
    followed = [0.0 if isnan(reward) else reward for _, reward in turns]
    whole = sum(followed) + rest
    for policy, found in rewards_of_turns(played(turns, whole)).items():
        roles = [(index, role) for index, (role, _) in enumerate(turns) if POLICIES[role] == policy]
        learning = [number for number, (_, role) in enumerate(roles) if role != "rival"]
        assert sum(found) == pytest.approx(whole, abs=1e-5)
        for number in learning[1:]:
            after = sum(followed[roles[number][0] :]) + rest
            assert sum(found[number:]) == pytest.approx(after, abs=1e-5)


@given(st.lists(PLAYED, min_size=1, max_size=3), st.data())
def test_the_checker_expects_what_the_job_writes(
    samples: list[Played], data: st.DataObject
) -> None:
    own = st.dictionaries(st.sampled_from(["plan", "code", "other"]), st.just(0.5))
    outcomes = [
        played(turns, 1.0, sample, rewards=data.draw(own)) for sample, turns in enumerate(samples)
    ]
    if data.draw(st.booleans()):
        outcomes = [changed(one, turn_rewards=b"") for one in outcomes]
    ended = a_task(outcomes)
    for group in GroupAssembler(RECIPE).on_task(ended, RECORDED_MS):
        kept = [outcomes[sample.sample] for sample in group.samples]
        expected = _expected(RECIPE.policies[group.policy], kept, ended, group.policy)
        for sample in group.samples:
            assert sample.advantages in expected[sample.sample]


class Given(TurnAdvantage):
    """The rewards as the estimator gets them."""

    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> Sequence[Sequence[float]]:
        return [turns or [reward] for reward, turns in zip(rewards, turn_rewards, strict=True)]
