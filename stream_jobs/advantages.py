"""Advantage estimators: how much better each sample of a group did than its siblings.

An estimator is a pure function. It takes the rewards of a group's n samples, n >= 1, as float64,
and returns n advantages in the same order. A `TurnAdvantage` returns some for each turn. The log
stores them as float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import fsum, sqrt
from statistics import fmean

from headrace.errors import HeadraceError
from headrace.schemas.recipe.tables import Settings
from headrace.schemas.role_rewards import are_equal

Advantage = Callable[[Sequence[float]], Sequence[float]]

FLOAT32_MAX = 3.4028234663852886e38
GRPO_EPSILON = 1e-6
"""Added to the deviation, so that GRPO never divides by 0."""


class TurnAdvantage(Settings):
    """The base of estimators that give each turn an advantage. Their fields are their options."""

    @abstractmethod
    def __call__(
        self, rewards: Sequence[float], turn_rewards: Sequence[Sequence[float]]
    ) -> Sequence[Sequence[float]]:
        """Returns the advantages of each sample: one for each of its turns, or one for all.

        `rewards` has the reward of each sample's episode. `turn_rewards` has the rewards that
        followed each of its turns of this policy, and 0 for a turn without one. The last one also
        has the rest of the episode's reward, for example a judge's or a penalty. So their sum is
        the sample's reward. A sample's are empty if the log does not have them: then return one
        advantage for the sample.
        """


def deviation(rewards: Sequence[float]) -> float:
    """Returns the population's standard deviation. It is exactly 0 if the rewards are equal, but
    for rounding.

    `statistics.pstdev` is ten times slower, because it calculates with fractions.
    """
    squares = [difference * difference for difference in dr_grpo(rewards)]
    return sqrt(fsum(squares) / len(rewards))


def grpo(rewards: Sequence[float]) -> list[float]:
    """Returns (reward - mean) / (deviation + 1e-6), with the population's standard deviation.

    GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2. All advantages are 0 if the rewards are
    equal, for example in a group of one.
    """
    scale = deviation(rewards) + GRPO_EPSILON
    return [advantage / scale for advantage in dr_grpo(rewards)]


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """Returns reward - mean: GRPO without the division, which favours groups of small deviation.

    Dr. GRPO (arXiv 2503.20783), section 3.2. All advantages are 0 if the rewards are equal, for
    example in a group of one. The paper's other change, to the loss, is not part of this.
    """
    if are_equal(min(rewards), max(rewards)):
        return [0.0] * len(rewards)
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float]) -> list[float]:
    """Returns reward - mean of the others: REINFORCE with a leave-one-out baseline.

    RLOO (arXiv 2402.14740), section 2.3. This equals n / (n - 1) times `dr_grpo`. In a group of
    one the advantage is 0, because there are no others.
    """
    count = len(rewards)
    scale = count / (count - 1) if count > 1 else 0.0
    return [scale * advantage for advantage in dr_grpo(rewards)]


def estimated(
    name: str,
    estimator: Advantage | TurnAdvantage,
    task: int,
    rewards: Sequence[float],
    turn_rewards: Sequence[Sequence[float]],
) -> list[tuple[float, ...]]:
    """Returns each sample's advantages: one for all its turns, or one for each.

    `name` is the recipe's name of the estimator, and `turn_rewards` has the rewards of each
    sample's turns. Raises HeadraceError if the estimator returns a wrong number of values, or
    values that are not finite as float32.
    """
    found: Sequence[Sequence[float]]
    if isinstance(estimator, TurnAdvantage):
        found = estimator(tuple(rewards), turn_rewards)
    else:
        found = [(value,) for value in estimator(tuple(rewards))]
    advantages = [tuple(float(value) for value in one) for one in found]
    if len(advantages) != len(rewards):
        raise HeadraceError(
            f"advantage {name!r} gave {len(advantages)} values for the {len(rewards)} rewards of "
            f"task {task}. Make it return one for each reward"
        )
    for index, (one, turns) in enumerate(zip(advantages, turn_rewards, strict=True)):
        if len(one) not in (1, len(turns)):
            raise HeadraceError(
                f"advantage {name!r} gave {len(one)} values for the {len(turns)} turns of reward "
                f"{index} of task {task}. Make it return one for each turn, or one for all"
            )
    # This rejects NaN, too.
    if not all(abs(value) <= FLOAT32_MAX for one in advantages for value in one):
        raise HeadraceError(
            f"advantage {name!r} gave {advantages} for rewards {rewards} of task {task}. Make it "
            "return finite float32 values"
        )
    return advantages
