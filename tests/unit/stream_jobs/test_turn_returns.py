"""Advantages of turns: worked out by hand, and as they reach a group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import EpisodeEnded, GroupClosed, PolicyUse
from headrace.schemas.packed import pack_f32, unpack_f32
from headrace.schemas.recipe.tables import Settings
from headrace.stream_jobs.advantages import TurnAdvantage, grpo
from headrace.stream_jobs.filters import Group
from headrace.stream_jobs.load_advantage import load_advantage
from headrace.stream_jobs.turn_advantages.turn_returns import TurnReturns
from tests.unit.stream_jobs.test_groups import a_task, an_outcome, close

HERE = "tests.unit.stream_jobs.test_turn_returns"
NAN = math.nan


def test_each_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    """Returns with discount 0.5: [1.5, 1], [0.25, 0.5, 1] and []; the third has no turns."""
    estimate = TurnReturns(discount=0.5, weight=2.0, normalize=False)
    found = estimate([2.0, 1.0, 0.0], [[1.0, 1.0], [0.0, 0.0, 1.0], []])
    assert found[0] == pytest.approx([1 + 2 * 0.625, 1 + 2 * 0.25])
    assert found[1] == pytest.approx([-2 * 0.625, -2 * 0.25, 0.0])
    assert found[2] == [-1.0]


@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.lists(st.floats(-5, 5), max_size=5)), min_size=1, max_size=6
    )
)
def test_it_is_the_papers_formula_in_numpy(samples: list[tuple[float, list[float]]]) -> None:
    rewards, turn_rewards = [one for one, _ in samples], [one for _, one in samples]

    found = TurnReturns(discount=0.9)(rewards, turn_rewards)

    def compared(values: Sequence[float]) -> Any:
        one = np.array(values)
        if len(set(values)) == 1:
            return one * 0
        return (one - one.mean()) / (one.std() + 1e-6)

    returns = [
        [sum(0.9 ** (i - k) * one[i] for i in range(k, len(one))) for k in range(len(one))]
        for one in turn_rewards
    ]
    for number, (whole, one) in enumerate(zip(compared(rewards), returns, strict=True)):
        assert len(found[number]) == max(1, len(one))
        for turn in range(len(one)):
            here = [number for number, other in enumerate(returns) if turn < len(other)]
            values = [returns[other][turn] for other in here]
            if max(values) - min(values) <= 1e-6 * max(
                sum(map(abs, turn_rewards[i])) for i in here
            ):
                continue  # rounding decides
            expected = whole + compared(values)[here.index(number)]
            assert found[number][turn] == pytest.approx(expected, rel=1e-4, abs=1e-4)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_with_one_turn_and_half_a_weight_each_it_is_twice_grpo(rewards: list[float]) -> None:
    difference, size = max(rewards) - min(rewards), max(map(abs, rewards))
    assume(difference == 0 or difference > 1e-6 * size)
    found = TurnReturns()(rewards, [[reward] for reward in rewards])
    assert [one for [one] in found] == pytest.approx([2 * one for one in grpo(rewards)])


def played(sample: int, turns: list[float] | bytes, **changes: Any) -> EpisodeEnded:
    """An episode with the rewards of its turns, NaN for a turn without one."""
    packed = turns if isinstance(turns, bytes) else pack_f32(turns)
    use = PolicyUse(policy="default", tokens=5, longest=9, oldest_version=3, turn_rewards=packed)
    return an_outcome(sample, changes.pop("reward", 1.0), policies=(use,), **changes)


def advantages(closed: GroupClosed) -> list[list[float]]:
    return [unpack_f32(sample.advantages) for sample in closed.samples]


def test_a_group_has_an_advantage_for_each_turn() -> None:
    options = {"use": "turn_returns", "discount": 1.0, "normalize": False}
    task = a_task([played(0, [NAN, 1.0]), played(1, [0.0, 0.0], reward=0.0)])
    closed = close(task, advantage=options, filters=["zero_advantage"])
    assert closed.estimator == "turn_returns"
    assert advantages(closed) == [[1.0, 1.0], [-1.0, -1.0]]


def test_what_followed_the_last_turn_counts_for_that_turn() -> None:
    """For example the penalty of a limit, which the environment does not give."""
    task = a_task(
        [
            played(0, [0.1, 0.2], reward=0.1 + 0.2),  # the same, but for the rounding of float32
            played(1, [0.5, NAN], reward=-1.0, ending="turn_limit"),
            played(2, [NAN, NAN], reward=2.0),
        ]
    )
    closed = close(task, advantage=f"{HERE}:Raw")
    assert advantages(closed) == [unpack_f32(pack_f32([0.1, 0.2])), [0.5, -1.5], [0.0, 2.0]]


@pytest.mark.parametrize("whole", [1.0, 10.0, 100.0, 1000.0])
def test_equal_returns_of_float32_rewards_are_equal(whole: float) -> None:
    shares = [0.333, 0.667, 0.5, 0.1, 0.9, 0.25, 0.7, 0.2]
    task = a_task(
        [
            played(sample, [whole * share, whole * (1 - share), 0.0], reward=whole)
            for sample, share in enumerate(shares)
        ]
    )
    closed = close(task, advantage={"use": "turn_returns", "discount": 1.0})
    assert [turns[0] for turns in advantages(closed)] == [0.0] * len(shares)
    second = [turns[1] for turns in advantages(closed)]
    assert second == pytest.approx(grpo([whole * (1 - share) for share in shares]), rel=1e-4)


@pytest.mark.parametrize("lost", [b"", b"123"])
def test_a_sample_whose_turns_are_not_recorded_has_one_advantage(lost: bytes) -> None:
    """A result that is too large for a record keeps no rewards of turns."""
    task = a_task([played(0, [0.5, 0.5]), played(1, lost, reward=0.0)])
    closed = close(task, advantage={"use": "turn_returns", "normalize": False})
    assert advantages(closed) == [[0.5, 0.5], [-0.5]]


def test_a_policy_in_two_roles_has_one_advantage() -> None:
    use = PolicyUse(
        policy="default", tokens=5, longest=9, oldest_version=3, turn_rewards=pack_f32([1.0])
    )
    both = an_outcome(0, policies=(use, use.model_copy(update={"role": "critic"})))
    assert advantages(close(a_task([both]), advantage="turn_returns")) == [[0.0]]


def test_an_absurd_reward_of_a_turn_excludes_its_sample_alone() -> None:
    task = a_task([played(0, [1.0]), played(1, [math.inf]), played(2, [0.0])])
    closed = close(task, advantage="turn_returns")
    assert [(one.sample, one.reason) for one in closed.excluded] == [(1, "reward_out_of_range")]
    assert len(close(task, advantage="grpo").samples) == 3


def test_a_filter_sees_the_advantage_of_each_samples_most_telling_turn() -> None:
    task = a_task([played(0, [0.0, -3.0], reward=-3.0), played(1, [0.0, 0.0], reward=0.0)])
    closed = close(
        task, advantage=f"{HERE}:Raw", filters=[{"use": f"{HERE}:Strongest", "least": 4}]
    )
    assert closed.reason == "weak_3"


def test_a_wrong_number_of_turns_is_named() -> None:
    with pytest.raises(HeadraceError, match="gave 3 values for the 2 turns of reward 0 of task 7"):
        close(a_task([played(0, [0.0, 1.0])]), advantage=f"{HERE}:Wrong")


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"use": "turn_returns", "discounts": 1.0}, "discounts: no such key. Its options are disc"),
        ({"use": "turn_returns", "discount": 2.0}, "discount: Input should be less than or equal"),
        ({"use": "grpo", "discount": 1.0}, "'grpo' has no options, but the recipe gives it disc"),
    ],
)
def test_a_wrong_option_is_named(choice: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        load_advantage(choice)


class Raw(TurnAdvantage):
    """The rewards of the turns themselves."""

    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> Sequence[Sequence[float]]:
        return turn_rewards


class Wrong(TurnAdvantage):
    """Three values, whatever the turns are."""

    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> Sequence[Sequence[float]]:
        return [[0.0] * 3 for _ in rewards]


class Strongest(Settings):
    """A filter with an option."""

    least: float

    def __call__(self, group: Group) -> str | None:
        strongest = max(map(abs, group.advantages))
        return None if strongest >= self.least else f"weak_{strongest:.0f}"
