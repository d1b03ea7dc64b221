"""Advantage estimators: how much better each sample of a group did than its siblings.

An estimator takes the rewards of a group's samples, in their order, and returns as many
advantages. It is pure: the same rewards give the same advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import fsum, sqrt
from statistics import fmean

from headrace.services.base.plugins import Loader

Advantage = Callable[[Sequence[float]], list[float]]

GRPO_EPSILON = 1e-6
"""Keeps GRPO's quotient finite."""

ADVANTAGES: dict[str, Loader] = {
    "grpo": lambda: grpo,
    "dr_grpo": lambda: dr_grpo,
    "rloo": lambda: rloo,
}
"""The built-in estimators by the recipe's name."""


def deviation(rewards: Sequence[float]) -> float:
    """The population's standard deviation, in float64. 0 exactly where the rewards are equal.

    `statistics.pstdev` is exact and ten times slower: it calculates in fractions.
    """
    squares = [difference * difference for difference in dr_grpo(rewards)]
    return sqrt(fsum(squares) / len(rewards))


def grpo(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (deviation + 1e-6), the deviation over the whole group (population).

    GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2. All 0 where the rewards are equal, so
    also in a group of one.
    """
    scale = deviation(rewards) + GRPO_EPSILON
    return [advantage / scale for advantage in dr_grpo(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """reward - mean: GRPO without the division, which favours groups of little deviation.

    Dr. GRPO (arXiv 2503.20783), section 3.2. All 0 where the rewards are equal, so also in a
    group of one.
    """
    if min(rewards) == max(rewards):
        return [0.0] * len(rewards)  # exactly: the mean of equal rewards may be off by a rounding
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others: REINFORCE with a leave-one-out baseline.

    RLOO (arXiv 2402.14740), section 2.3. That is n / (n - 1) times `dr_grpo`. A group of one has
    no others to compare with: its advantage is 0.
    """
    count = len(rewards)
    scale = count / (count - 1) if count > 1 else 0.0
    return [scale * advantage for advantage in dr_grpo(rewards)]
