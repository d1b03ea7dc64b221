"""Rewards of roles, and roles that a pinned version plays."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.events import EpisodeEnded, Sampling, TaskSubmitted, TrajectoryRecorded, Use
from headrace.schemas.packed import unpack_i32
from headrace.schemas.role_rewards import length_penalty
from headrace.services.agent.episode import Agent, Episode
from tests.unit.agent.test_episode_run import World, end, play, task


def of_roles(*pinned: str, policy: str | None = None, **changes: Any) -> TaskSubmitted:
    """A task of two roles. They are policies of their names, or `policy` plays both."""
    roles = {
        role: Use(
            policy=policy or role,
            version=3 if role in pinned else None,
            sampling=Sampling(max_tokens=8),
        )
        for role in ("solver", "verifier")
    }
    return task(roles=roles, **changes)


def rewarding(**rewards: float) -> Agent:
    """An agent of four turns that sets rewards, some before its limit of turns."""

    async def agent(episode: Episode) -> None:
        episode.rewards.update(rewards)
        for role in ("solver", "verifier", "solver", "verifier"):
            await episode.generate("a", role=role)

    return agent


def rewards(outcome: EpisodeEnded) -> dict[str, float]:
    return {role: outcome.rewards[role] for role in ("solver", "verifier")}


def test_the_episodes_reward_is_the_mean_of_its_roles_if_nothing_else_gives_one() -> None:
    outcome, trajectory = play(World(), of_roles(), rewarding(solver=1.0, verifier=0.0, other=9.0))
    assert (outcome.reward, rewards(outcome)) == (0.5, {"solver": 1.0, "verifier": 0.0})
    assert (trajectory.reward, trajectory.rewards) == (outcome.reward, outcome.rewards)
    assert play(World(), of_roles(), rewarding(other=9.0))[0].reward is None


def test_limits_and_penalties_hold_for_each_roles_reward() -> None:
    agent = rewarding(solver=1.0, verifier=-2.0)
    cut, _ = play(World(), of_roles(max_turns=3), agent, unfinished_reward=-1.0)
    assert (cut.ending, cut.reward) == ("turn_limit", -1.0)
    assert rewards(cut) == {"solver": -1.0, "verifier": -2.0}, "a lower reward stays"

    length = {"overlong_buffer": 4, "overlong_penalty": 2.0}  # 8 tokens are sampled
    long, _ = play(World(), of_roles(max_tokens=10), agent, **length)
    assert (long.ending, long.rewards["overlong"]) == ("finished", -1.0)
    assert rewards(long) == {"solver": 0.5, "verifier": -2.5}, "each pays for its own tokens"
    assert long.reward == -1.5


@pytest.mark.parametrize("untrained", [(), ("verifier",)])
@pytest.mark.parametrize("undelivered", [False, True])
def test_groups_know_what_each_policy_has_paid_for_length(
    untrained: tuple[str, ...], undelivered: bool
) -> None:
    async def agent(episode: Episode) -> None:
        episode.rewards.update(solver=1.0, verifier=1.0)
        for role in ("solver", "solver", "solver", "verifier"):
            await episode.generate("a", role=role)
        if undelivered:
            first = next(iter(episode.turns.values()))
            first.turn = first.turn.model_copy(update={"trainable": False})

    # 8 tokens are sampled. Those of an untrained policy or an undelivered answer do not count.
    counted = 8 - 2 * len(untrained) - 2 * undelivered
    length = {"overlong_buffer": 8, "overlong_penalty": 0.9}
    outcome, _ = play(World(), of_roles(max_tokens=8), agent, untrained=untrained, **length)
    assert outcome.rewards["overlong"] == pytest.approx(-0.9 * counted / 8)
    paid = {role: 1.0 - reward for role, reward in rewards(outcome).items()}
    assert sum(paid.values()) == pytest.approx(0.9 * counted / 8), "together they pay all of it"
    for policy in {"solver", "verifier"} - set(untrained):
        assert length_penalty(outcome, policy, untrained) == pytest.approx(paid[policy])


def test_a_failed_episode_gives_no_role_a_reward() -> None:
    async def fails(episode: Episode) -> None:
        episode.rewards["solver"] = 1.0
        await episode.generate("a", role="solver")
        raise ValueError("a bug")

    outcome, trajectory = play(World(), of_roles(attempts=1), fails)
    assert (outcome.ending, outcome.reward, trajectory.reward) == ("failed", None, None)


def uses(outcome: EpisodeEnded) -> list[tuple[str, str, int, list[int]]]:
    return [(one.policy, one.role, one.tokens, unpack_i32(one.turns)) for one in outcome.policies]


def trainable(trajectory: TrajectoryRecorded) -> list[bool]:
    return [turn.trainable for turn in trajectory.turns]


def test_an_outcome_says_which_turns_each_role_of_a_policy_had() -> None:
    outcome, _ = play(World(), of_roles(policy="default"), rewarding(solver=1.0))
    assert uses(outcome) == [
        ("default", "solver", 4, [0, 2]),
        ("default", "verifier", 4, [1, 3]),
    ]
    apart, _ = play(World(), of_roles(), rewarding(solver=1.0))
    assert uses(apart) == [("solver", "solver", 4, [0, 2]), ("verifier", "verifier", 4, [1, 3])]
    alone, _ = play(World())
    assert uses(alone) == [("default", "policy", 6, [])]


def test_a_pinned_role_is_never_trained() -> None:
    submitted = of_roles("verifier", policy="default")
    outcome, trajectory = play(World(), submitted, rewarding(solver=1.0))
    assert trainable(trajectory) == [True, False, True, False]
    assert uses(outcome)[1] == ("default", "verifier", 0, [1, 3])

    measured = of_roles("solver", "verifier", policy="default", purpose="evaluate")
    assert trainable(play(World(), measured, rewarding(solver=1.0))[1]) == [True] * 4


def test_what_a_pinned_role_says_costs_nobody_a_reward() -> None:
    length = {"overlong_buffer": 4, "overlong_penalty": 2.0}
    submitted = of_roles("verifier", policy="default", max_tokens=10)
    outcome, _ = play(World(), submitted, rewarding(solver=1.0), **length)
    assert outcome.rewards["solver"] == 1.0


@pytest.mark.parametrize("turns", [3, 10])
@pytest.mark.parametrize("value", ["much", None, {}])
def test_a_reward_that_is_no_number_fails_the_attempt(value: Any, turns: int) -> None:
    submitted = of_roles(attempts=1, max_turns=turns)
    outcome = end(World(), submitted, rewarding(other=value, solver=value))
    assert (outcome.ending, outcome.reward) == ("failed", None)
    assert outcome.failure is not None
    assert "'other'" in outcome.failure.message
