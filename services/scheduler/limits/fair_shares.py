"""How many units of a limit each worker should have. Pure.

The shares are max-min fair: no worker gets more than it wants as long as another one gets less
than it wants and less than the first one. Units that nobody wants are spread evenly, so that a call
which comes next need not wait for a division. If there are fewer units than workers, those that
want one take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

TURN_S = 2.0
"""Seconds that a worker keeps its only unit at least, if others wait for it."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What one worker has and wants."""

    units: int
    """Its share now."""
    wanted: int
    since: float
    """Since when it has units, if it has some, else since when it has none."""


def fair_shares(units: int, wishes: Sequence[Wish], now_s: float) -> list[int]:
    """Returns the shares of these workers, in the same order. They are `units` in total."""
    if units < len(wishes):
        return _turns(units, wishes, now_s)
    if not wishes:
        return []
    level = _level(units, wishes)
    shares = [min(_wanted(wish), level) for wish in wishes]
    # One more goes to those that have most now, so that nothing moves without a reason.
    order = sorted(range(len(wishes)), key=lambda i: -wishes[i].units)
    lacking = [i for i in order if shares[i] < _wanted(wishes[i])]
    extra, odd = divmod(units - sum(shares), len(lacking or order))
    for index, i in enumerate(lacking or order):
        shares[i] += extra + (index < odd)
    return shares


def _level(units: int, wishes: Sequence[Wish]) -> int:
    """How many units each worker gets at least that wants so many."""
    left = units
    wanted = sorted(map(_wanted, wishes))
    for index, want in enumerate(wanted):
        fair = left // (len(wanted) - index)
        if want > fair:
            return fair
        left -= want
    return wanted[-1]


def _wanted(wish: Wish) -> int:
    """A worker without calls has one unit, so that its next call does not wait."""
    return max(1, wish.wanted)


def _turns(units: int, wishes: Sequence[Wish], now_s: float) -> list[int]:
    """One unit for each of some workers: first those whose turn goes on, then who waits longest."""

    def rank(i: int) -> tuple[bool, float, int]:
        wish = wishes[i]
        if wish.units and now_s - wish.since < TURN_S:
            return wish.wanted == 0, -inf, i
        return wish.wanted == 0, inf if wish.units else wish.since, i

    chosen = set(sorted(range(len(wishes)), key=rank)[:units])
    return [int(i in chosen) for i in range(len(wishes))]
