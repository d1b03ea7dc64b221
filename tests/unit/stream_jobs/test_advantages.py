"""Advantage estimators against their papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.stream_jobs.advantages import deviation, dr_grpo, grpo, rloo

ESTIMATORS = [grpo, dr_grpo, rloo]
REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=64)


def test_grpo_divides_by_the_population_deviation() -> None:
    assert grpo([1.0, 0.0, 0.0, 0.0]) == pytest.approx(
        [0.75 / math.sqrt(0.1875), *[-0.25 / math.sqrt(0.1875)] * 3], rel=1e-5
    )


def test_dr_grpo_only_takes_the_mean_away() -> None:
    assert dr_grpo([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


@given(REWARDS.filter(lambda rewards: len(rewards) > 1))
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    others = [reward - (sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    assert rloo(rewards) == pytest.approx(others, abs=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize(
    "rewards",
    [
        [1.0],
        [0.1, 0.1, 0.1],
        [0.3] * 7,
        [0.1 + 0.2, 0.3],
        [0.0, math.fsum([1.0] + [-0.1] * 10), 0.1 + 0.2 - 0.3],
    ],
)
def test_equal_rewards_give_exactly_nothing(
    estimate: Callable[[Sequence[float]], list[float]], rewards: list[float]
) -> None:
    assert estimate(rewards) == [0.0] * len(rewards)
    assert deviation(rewards) == 0


def test_a_small_difference_is_none_of_rounding() -> None:
    assert dr_grpo([1.0, 1.0 - 1e-9]) == pytest.approx([5e-10, -5e-10], rel=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(rewards=REWARDS)
def test_advantages_keep_the_order_and_sum_to_nothing(
    estimate: Callable[[Sequence[float]], list[float]], rewards: list[float]
) -> None:
    advantages = estimate(rewards)
    assert len(advantages) == len(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-3)
    ranked = sorted(range(len(rewards)), key=rewards.__getitem__)
    in_order = [advantages[index] for index in ranked]
    assert in_order == sorted(in_order)
