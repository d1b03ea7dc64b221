"""The checks for users' own algorithms: they pass what Headrace brings, and find what is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from pydantic import PrivateAttr

from headrace import Curator, GroupClosed, ItemRecord
from headrace.services.tasks.curation.curators import CURATORS, load_curator
from headrace.stream_jobs.advantages import dr_grpo, grpo, rloo
from headrace.stream_jobs.filters import Group, MeanReward, zero_advantage
from headrace.stream_jobs.selection import BestOf, Candidates
from headrace.stream_jobs.turn_advantages.turn_returns import TurnReturns
from headrace.stream_jobs.turn_advantages.turn_rewards import TurnRewards
from headrace.testing import check_advantage, check_curator, check_filter, check_selection

NUMBERS = count()


def test_what_headrace_brings_keeps_the_contracts() -> None:
    for advantage in (grpo, dr_grpo, rloo, TurnReturns(), TurnRewards()):
        check_advantage(advantage)
    for drop in (zero_advantage, MeanReward(lowest=0.1)):
        check_filter(drop)
    for by in (BestOf(samples=3), BestOf(samples=9, by="tokens", max_tokens=300)):
        check_selection(by)


def divides(rewards: Sequence[float]) -> list[float]:
    return [reward / sum(rewards) for reward in rewards]


def infinite(rewards: Sequence[float]) -> list[float]:
    return [math.inf for _ in rewards]


def counts(rewards: Sequence[float]) -> list[float]:
    return [float(next(NUMBERS)) for _ in rewards]


def sorts(rewards: Any) -> list[float]:
    rewards.sort()
    return list(rewards)


def says_why(group: Group) -> str | None:
    return "Reward too low" if group.mean < 0.5 else None


def alternates(group: Group) -> str | None:
    return "odd" if next(NUMBERS) % 2 else None


def the_solved(candidates: Candidates) -> list[int]:
    return [index for index, reward in enumerate(candidates.rewards) if reward >= 1.0]


@pytest.mark.parametrize(
    ("check", "broken", "problem"),
    [
        (check_advantage, divides, "it raised ZeroDivisionError"),
        (check_advantage, infinite, "finite float32"),
        (check_advantage, counts, "for the same group"),
        (check_advantage, sorts, "no attribute .sort"),
        (check_filter, says_why, "snake_case"),
        (check_filter, alternates, "for the same group"),
        (check_selection, the_solved, "at least one"),
    ],
)
def test_what_breaks_a_contract_is_found(
    check: Callable[[Any], None], broken: Callable[..., Any], problem: str
) -> None:
    with pytest.raises(AssertionError, match=problem):
        check(broken)


class Stubborn(Curator):
    """Its state is not what it changes."""

    _groups: int = PrivateAttr(default=0)

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        return 1 / (1 + self._groups)

    def on_group(self, group: GroupClosed) -> None:
        self._groups += 1


class Raising(Curator):
    """Has a mistake in it."""

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        return 1 / 0


def test_curators_are_checked() -> None:
    for choice in CURATORS:
        check_curator(load_curator(choice))
    with pytest.raises(AssertionError, match=r"restored from Stubborn\.state"):
        check_curator(Stubborn())
    with pytest.raises(AssertionError, match="Raising: it raised ZeroDivisionError"):
        check_curator(Raising())
