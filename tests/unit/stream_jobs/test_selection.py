"""Which samples of a group are trained on, and what the others still count for."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import fmean, pvariance
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import Exclusion, TaskEnded
from headrace.schemas.packed import pack_f32, unpack_f32
from headrace.stream_jobs.advantages import grpo
from headrace.stream_jobs.groups import GroupAssembler
from headrace.stream_jobs.selection import BestOf, Candidates, most_varied
from tests.unit.stream_jobs.test_groups import a_recipe, a_task, an_outcome, close

REWARDS = st.lists(st.integers(-4, 4).map(lambda one: one / 4), min_size=1, max_size=9)


def candidates(rewards: list[float], tokens: list[int]) -> Candidates:
    return Candidates(0, "p", "i", 0, tuple(rewards), tuple(tokens))


def with_rewards(rewards: list[float]) -> TaskEnded:
    return a_task([an_outcome(sample, reward) for sample, reward in enumerate(rewards)])


@given(REWARDS, st.integers(1, 9))
def test_no_other_samples_have_a_larger_variance(rewards: list[float], count: int) -> None:
    chosen = most_varied(rewards, count)
    assert len(set(chosen)) == len(chosen) == min(count, len(rewards))
    best = max(
        pvariance([rewards[index] for index in one])
        for one in combinations(range(len(rewards)), len(chosen))
    )
    assert pvariance([rewards[index] for index in chosen]) == pytest.approx(best, abs=1e-12)


def test_a_budget_of_tokens_does_not_favour_short_samples() -> None:
    """The length of what is kept is on average that of all samples; without the last one it is
    not."""
    chance, kept_tokens, kept, cut_tokens, cut = Random(0), 0, 0, 0, 0
    for _ in range(4000):
        tokens = [round(chance.lognormvariate(4, 0.8)) + 1 for _ in range(40)]
        chosen = BestOf(samples=40, by="tokens", max_tokens=600)(candidates([0.0] * 40, tokens))
        assert sum(tokens[index] for index in chosen[:-1]) < 600
        kept_tokens, kept = kept_tokens + sum(tokens[i] for i in chosen), kept + len(chosen)
        cut_tokens, cut = cut_tokens + sum(tokens[i] for i in chosen[:-1]), cut + len(chosen) - 1
    expected = 2.718281828 ** (4 + 0.8**2 / 2) + 1
    assert kept_tokens / kept == pytest.approx(expected, rel=0.01)
    assert cut_tokens / cut < 0.95 * expected


def test_the_number_of_samples_bounds_a_budget_too() -> None:
    chosen = BestOf(samples=2, by="tokens", max_tokens=100)(candidates([0.0] * 4, [1, 1, 1, 1]))
    assert list(chosen) == [0, 1]


def test_left_out_samples_count_in_the_mean_and_not_in_the_advantages() -> None:
    rewards = [0.0, 1.0, 0.5, 1.0, 0.0, 0.5]
    select = {"use": "best_of", "samples": 4}
    group = close(with_rewards(rewards), select=select)
    assert [one.sample for one in group.samples] == [0, 1, 3, 4]
    assert group.excluded == (
        Exclusion(sample=2, reason="not_selected"),
        Exclusion(sample=5, reason="not_selected"),
    )
    assert group.mean == pytest.approx(0.5)
    assert group.deviation == pytest.approx(pvariance(rewards) ** 0.5)
    expected = grpo([0.0, 1.0, 1.0, 0.0])
    assert [one.advantages for one in group.samples] == [pack_f32([one]) for one in expected]


def test_advantages_may_follow_from_all_rewards() -> None:
    rewards = [0.0, 1.0, 1.0, 1.0]
    select = {"use": "best_of", "samples": 2, "advantages": "all"}
    group = close(with_rewards(rewards), select=select, advantage="dr_grpo")
    found = {one.sample: unpack_f32(one.advantages)[0] for one in group.samples}
    mean = fmean(rewards)
    assert found == pytest.approx({one: rewards[one] - mean for one in found})
    assert len(found) == 2


def test_filters_see_what_is_selected() -> None:
    """All kept samples have the reward 1, so there is nothing to learn."""
    select = f"{__name__}:the_good"
    group = close(with_rewards([0.0, 1.0, 1.0]), select=select, filters=("zero_advantage",))
    assert (group.verdict, group.reason) == ("dropped", "zero_advantage")
    assert group.mean == pytest.approx(2 / 3), "it is still reported"
    assert [one.sample for one in group.excluded] == [0]


def the_good(found: Candidates) -> list[int]:
    return [index for index, reward in enumerate(found.rewards) if reward == 1.0]


def nothing(_: Candidates) -> list[int]:
    return []


def twice(_: Candidates) -> list[int]:
    return [0, 0]


def beyond(found: Candidates) -> list[int]:
    return [len(found.rewards)]


@pytest.mark.parametrize("name", ["nothing", "twice", "beyond"])
def test_a_selection_that_returns_no_samples_is_named(name: str) -> None:
    with pytest.raises(HeadraceError, match=f"selection '.*{name}' returned"):
        close(with_rewards([0.0, 1.0]), select=f"{__name__}:{name}")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "samples"),
        ({"samples": 2, "by": "tokens"}, "max_tokens"),
        ({"samples": 2, "max_tokens": 4}, "max_tokens"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        GroupAssembler(a_recipe(select={"use": "best_of", **options}))


def test_a_filter_with_options_keeps_a_range_of_rewards() -> None:
    band = {"use": "mean_reward", "lowest": 0.2, "highest": 0.8}
    filters = ("zero_advantage", band)
    assert close(with_rewards([0.0, 1.0]), filters=filters).verdict == "scored"
    hard = close(with_rewards([0.0] * 9 + [1.0]), filters=filters)
    easy = close(with_rewards([1.0] * 9 + [0.0]), filters=filters)
    assert (hard.reason, easy.reason) == ("reward_too_low", "reward_too_high")
