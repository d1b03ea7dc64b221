"""Checks that your own advantage, filter, selection or curator keeps its contract.

They need no test framework, no broker and no GPU. Each calls your function or object with many
groups and raises AssertionError, which says for which of them it broke what:

    from headrace.testing import check_filter

    def test_my_filter():
        check_filter(my_filter)

Headrace may call it again for the same group, after a restart or in a replay. So all of them must
be pure: the same group gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from statistics import fmean
from typing import Any

from headrace.errors import HeadraceError
from headrace.services.tasks.curation.check_curator import check_contract
from headrace.services.tasks.curation.curator import Curator
from headrace.stream_jobs.advantages import (
    Advantage,
    TurnAdvantage,
    deviation,
    dr_grpo,
    estimated,
)
from headrace.stream_jobs.filters import Filter, Group, reason_of
from headrace.stream_jobs.selection import Candidates, Selection, selected

TURNS = 4
"""The most turns of a sample."""


def check_advantage(advantage: Advantage | TurnAdvantage) -> None:
    """Checks an advantage estimator. Raises AssertionError if it breaks its contract.

    It must return a finite float32 for each reward, or each turn, and the same for the same
    rewards.
    """
    for rewards, turns in _groups():
        _same_twice(
            partial(estimated, _name(advantage), advantage, 0, rewards, turns),
            f"advantage {_name(advantage)}, rewards {rewards}",
        )


def check_filter(drop: Filter) -> None:
    """Checks a filter of groups. Raises AssertionError if it breaks its contract.

    It must return None or a reason in snake_case of at most 64 characters, and the same for the
    same group.
    """
    for rewards, _ in _groups():
        group = Group(
            task=0,
            policy="default",
            item_id="item",
            epoch=0,
            rewards=rewards,
            advantages=tuple(dr_grpo(rewards)),
            tokens=tuple(_lengths(len(rewards))),
            mean=fmean(rewards),
            deviation=deviation(rewards),
        )
        _same_twice(
            partial(reason_of, _name(drop), drop, group),
            f"filter {_name(drop)}, rewards {rewards}",
        )


def check_selection(selection: Selection) -> None:
    """Checks a selection of samples. Raises AssertionError if it breaks its contract.

    It must return at least one index, each index once and none that is out of range, and the same
    for the same group.
    """
    for rewards, _ in _groups():
        candidates = Candidates(
            task=0,
            policy="default",
            item_id="item",
            epoch=0,
            rewards=rewards,
            tokens=tuple(_lengths(len(rewards))),
        )
        _same_twice(
            partial(selected, _name(selection), selection, candidates),
            f"selection {_name(selection)}, rewards {rewards}",
        )


def check_curator(curator: Curator) -> None:
    """Checks a curator. Raises AssertionError if it breaks its contract.

    A chance is a number from 0 to 1. It follows from the statistics of the item, the epoch, the
    options and the state. A copy that restores the state continues with the same chances.
    """
    try:
        check_contract(curator)
    except HeadraceError as error:
        raise AssertionError(str(error)) from error
    except Exception as error:  # a user's own code may raise anything
        raise AssertionError(
            f"{_name(curator)}: it raised {type(error).__name__}: {error}"
        ) from error


def _groups() -> Iterator[tuple[tuple[float, ...], list[tuple[float, ...]]]]:
    """Yields rewards of the samples of a group, and of each sample's turns."""
    chance = Random(0)
    kinds: list[Callable[[], float]] = [
        lambda: 0.0,
        lambda: 1.0,
        lambda: float(chance.random() < 0.5),
        lambda: chance.gauss(0, 1),
        lambda: chance.choice([-1e6, 1e-9, 0.1 + 0.2, 1e6]),
    ]
    for size in (1, 2, 3, 8, 16, 64):
        for kind in kinds:
            rewards = tuple(kind() for _ in range(size))
            # The last turn has the reward, as if a judge gave it. Some logs do not have the turns.
            turns = [(0.0,) * chance.randint(0, TURNS - 1) + (one,) for one in rewards]
            yield rewards, turns if chance.random() < 0.8 else [() for _ in rewards]


def _lengths(size: int) -> list[int]:
    chance = Random(size)
    return [1 + round(chance.lognormvariate(5, 1)) for _ in range(size)]


def _same_twice(result: Callable[[], Any], name: str) -> None:
    """Raises AssertionError if a call raises, or if two calls return different results."""
    try:
        first, second = result(), result()
    except HeadraceError as error:
        raise AssertionError(str(error)) from error
    except Exception as error:  # a user's own code may raise anything
        raise AssertionError(f"{name}: it raised {type(error).__name__}: {error}") from error
    assert first == second, f"{name}: it returned {first}, and then {second} for the same group"


def _name(found: object) -> str:
    return getattr(found, "__name__", type(found).__name__)
