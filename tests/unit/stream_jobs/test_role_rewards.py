"""Each turn learns from the reward of its role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import EpisodeEnded, GroupClosed, PolicyUse
from headrace.schemas.packed import pack_f32, pack_i32, unpack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.role_rewards import length_penalty, policy_reward, role_reward
from headrace.stream_jobs.groups import GroupAssembler
from tests.unit.stream_jobs.test_groups import RECORDED_MS, a_recipe, a_task, an_outcome, reasons

TWO = Recipe.model_validate(
    {
        "name": "a-run",
        "tasks": {"roles": {"solver": "solver", "verifier": "verifier"}},
        "policies": {
            name: {"model": "tiny", "groups": {"advantage": "dr_grpo"}}
            for name in ("solver", "verifier")
        },
    }
)


def a_use(policy: str, role: str, **changes: Any) -> PolicyUse:
    fields: dict[str, Any] = {"tokens": 5, "longest": 9, "oldest_version": 3}
    return PolicyUse(policy=policy, role=role, **{**fields, **changes})


def of_two(sample: int, rewards: Mapping[str, float], reward: float = 0.5) -> EpisodeEnded:
    uses = (a_use("solver", "solver"), a_use("verifier", "verifier", tokens=2))
    return an_outcome(sample, reward, rewards=dict(rewards), policies=uses)


def played_twice(sample: int, rewards: Mapping[str, float], **changes: Any) -> EpisodeEnded:
    """Of one policy: turns 0, 2 and 4 of the first player, and 1 and 3 of the second."""
    uses = (
        a_use("default", "first", turns=pack_i32([0, 2, 4]), turn_rewards=pack_f32([0, 0, 0])),
        a_use("default", "second", turns=pack_i32([1, 3]), turn_rewards=pack_f32([0, 0])),
    )
    fields: dict[str, Any] = {"reward": 0.0, "rewards": dict(rewards), "policies": uses}
    return an_outcome(sample, **(fields | changes))


def close(*outcomes: EpisodeEnded, **groups: Any) -> GroupClosed:
    recipe = a_recipe(**({"advantage": "dr_grpo"} | groups))
    (closed,) = GroupAssembler(recipe).on_task(a_task(outcomes), RECORDED_MS)
    return closed


def advantages(closed: GroupClosed) -> list[list[float]]:
    return [unpack_f32(sample.advantages) for sample in closed.samples]


def test_each_policy_learns_from_the_reward_of_its_role() -> None:
    outcomes = [of_two(0, {"solver": 1.0, "verifier": 0.0}), of_two(1, {"solver": 0.0})]
    solver, verifier = GroupAssembler(TWO).on_task(a_task(outcomes), RECORDED_MS)
    assert advantages(solver) == [[0.5], [-0.5]]
    assert (solver.mean, [one.reward for one in solver.samples]) == (0.5, [1.0, 0.0])
    assert advantages(verifier) == [[-0.25], [0.25]], "the second one has the episode's reward"
    assert (verifier.mean, [one.reward for one in verifier.samples]) == (0.25, [0.0, 0.5])


def test_a_role_without_a_usable_reward_leaves_out_its_own_policy_alone() -> None:
    outcomes = [of_two(0, {"solver": float("nan")}), of_two(1, {"solver": 1.0})]
    solver, verifier = GroupAssembler(TWO).on_task(a_task(outcomes), RECORDED_MS)
    assert reasons(solver) == {0: "reward_out_of_range"}
    assert [one.sample for one in verifier.samples] == [0, 1]


def test_a_policy_that_plays_itself_learns_each_turn_from_its_own_role() -> None:
    won, lost = {"first": 1.0, "second": -1.0}, {"first": -1.0, "second": 1.0}
    closed = close(played_twice(0, won), played_twice(1, lost))
    assert advantages(closed) == [[1, -1, 1, -1, 1], [-1, 1, -1, 1, -1]]
    assert (closed.mean, closed.deviation) == (0.0, 0.0), "of the means of both roles"
    kept = close(played_twice(0, won), played_twice(1, lost), filters=["zero_advantage"])
    assert kept.verdict == "scored", "the rewards are equal, but the advantages are not 0"


def test_roles_without_rewards_of_their_own_learn_together() -> None:
    closed = close(played_twice(0, {}), played_twice(1, {}, reward=1.0))
    assert advantages(closed) == [[-0.5], [0.5]]


def test_returns_of_turns_count_rewards_of_the_same_role() -> None:
    of_turns = {"use": "turn_returns", "discount": 1.0, "normalize": False}
    won, lost = {"first": 1.0, "second": -1.0}, {"first": -1.0, "second": 1.0}
    closed = close(played_twice(0, won), played_twice(1, lost), advantage=of_turns)
    assert advantages(closed)[0] == [2, -2, 2, -2, 2], "of the episode and of the turn"
    together = close(played_twice(0, {}), played_twice(1, {}, reward=1.0), advantage=of_turns)
    assert advantages(together)[1] == [1.0] * 5


def test_a_pinned_role_is_not_trained_and_does_not_make_its_sample_stale() -> None:
    pinned = a_use("default", "second", tokens=0, oldest_version=0, turns=pack_i32([1, 3]))
    first = played_twice(0, {}).policies[0]
    changes = {"policies": (first, pinned)}
    won, lost = {"first": 1.0, "second": -1.0}, {"first": -1.0, "second": 1.0}
    closed = close(played_twice(0, won, **changes), played_twice(1, lost, **changes))
    assert advantages(closed) == [[1.0], [-1.0]]
    assert {one.oldest_version for one in closed.samples} == {3}
    assert closed.mean == 0.0
    of_turns = {"use": "turn_returns", "discount": 1.0, "normalize": False}
    by_turn = close(
        played_twice(0, won, **changes), played_twice(1, lost, **changes), advantage=of_turns
    )
    assert advantages(by_turn)[0] == [2, 0, 2, 0, 2], "one for each turn of the policy"
    only = close(an_outcome(0, policies=(pinned,)))
    assert (only.verdict, only.reason, reasons(only)) == ("dropped", "no_tokens", {0: "no_tokens"})


@pytest.mark.parametrize("turns", [b"", pack_i32([0, 1]), b"odd"])
def test_turns_that_are_not_known_are_not_guessed(turns: bytes) -> None:
    uses = (a_use("default", "first", turns=pack_i32([0])), a_use("default", "second", turns=turns))
    told = close(played_twice(0, {"first": 1.0, "second": 0.0}, policies=uses))
    assert reasons(told) == {0: "turns_unknown"}
    assert close(played_twice(0, {}, policies=uses)).verdict == "scored"


def test_a_critic_gets_no_policy_with_several_rewards() -> None:
    rewards = {"use": "rewards"}
    recipe = Recipe.model_validate(
        {
            "name": "a-run",
            "policies": {
                "default": {
                    "model": "tiny",
                    "groups": {"advantage": rewards},
                    "training": {"critic": {}},
                }
            },
        }
    )
    won = played_twice(0, {"first": 1.0, "second": -1.0})
    (closed,) = GroupAssembler(recipe).on_task(a_task([won]), RECORDED_MS)
    assert (closed.verdict, closed.reason) == ("dropped", "several_rewards")
    (together,) = GroupAssembler(recipe).on_task(a_task([played_twice(0, {})]), RECORDED_MS)
    assert advantages(together) == [[0.0] * 5]


def test_a_demonstrated_role_leaves_the_other_its_advantage() -> None:
    first, second = played_twice(0, {}).policies
    shown = first.model_copy(update={"oldest_version": -1})
    rewards = {"first": 1.0, "second": 1.0}
    closed = close(
        played_twice(0, rewards, policies=(shown, second)),
        played_twice(1, {"first": 0.0, "second": 0.0}),
    )
    assert advantages(closed) == [[0, 0.5, 0, 0.5, 0], [0, -0.5, 0, -0.5, 0]]


def test_the_reward_of_a_policy_is_the_mean_of_its_roles() -> None:
    outcome = of_two(0, {"solver": 1.0}, reward=0.25)
    assert [policy_reward(outcome, name) for name in ("solver", "verifier")] == [1.0, 0.25]
    assert policy_reward(outcome, "absent") == 0.25
    assert role_reward(outcome, "solver") == 1.0
    failed = outcome.model_copy(update={"reward": None})
    assert (policy_reward(failed, "solver"), role_reward(failed, "solver")) == (None, None)
    itself = played_twice(0, {"first": 1.0, "second": -1.0})
    assert policy_reward(itself, "default") == 0.0


def test_a_role_with_a_reward_of_its_own_pays_for_its_own_tokens() -> None:
    uses = tuple(
        PolicyUse(policy=policy, role=role, tokens=tokens, longest=9, oldest_version=0)
        for policy, role, tokens in (("a", "solver", 30), ("a", "critic", 10), ("b", "judge", 60))
    )
    rewards = {"solver": 0.85, "overlong": -0.5}
    outcome = an_outcome(0, reward=0.5, rewards=rewards, policies=uses)
    # The critic and the judge share the episode's reward, which has lost 0.5.
    assert length_penalty(outcome, "a") == pytest.approx((0.5 * 0.3 + 0.5) / 2)
    assert length_penalty(outcome, "b") == 0.5
    plain = outcome.model_copy(update={"rewards": {"overlong": 0.5}})
    assert length_penalty(plain, "a") == 0, "a reward of this name is no penalty"


def test_tokens_of_a_policy_that_does_not_learn_cost_nobody_a_reward() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "tasks": {"roles": {"solver": "solver", "verifier": "verifier"}, "passing": 1.0},
            "agents": {"default": {"overlong_buffer": 64}},
            "policies": {
                "solver": {"model": "tiny", "groups": {"filters": ["zero_advantage"]}},
                "verifier": {"model": "tiny", "training": False},
            },
        }
    )
    outcomes = [of_two(sample, {"solver": 1.0}) for sample in range(3)]
    outcomes[0] = of_two(0, {"solver": 0.6, "overlong": -0.4})
    (closed,) = GroupAssembler(recipe).on_task(a_task(outcomes), RECORDED_MS)
    assert (closed.reason, closed.passed, closed.deviation) == ("zero_advantage", 3, 0)


@given(st.floats(0.01, 2), st.integers(1, 30_000), st.integers(0, 30_000))
def test_a_reward_of_0_that_has_paid_is_exactly_0_without_the_penalty(
    penalty: float, solver: int, verifier: int
) -> None:
    uses = (
        a_use("solver", "solver", tokens=solver),
        a_use("verifier", "verifier", tokens=verifier),
    )
    rewards = {"solver": -(penalty * solver / (solver + verifier)), "overlong": -penalty}
    outcome = an_outcome(0, -penalty, rewards=rewards, policies=uses)
    paid = policy_reward(outcome, "solver")
    assert paid is not None
    assert paid + length_penalty(outcome, "solver") == 0
