"""Filters: reasons not to train on a group. The log records what they drop, and why.

Dropped groups still count in a batch's mean reward.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.schemas.recipe.tables import Settings
from headrace.schemas.role_rewards import passes


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one task that count for one policy and that it sampled itself, without those
    that a selection left out.

    Each tuple has one value for each sample; there is at least one sample.
    """

    task: int
    policy: str
    item_id: str
    epoch: int
    rewards: tuple[float, ...]
    """Without the penalties for length (`overlong_penalty`)."""
    advantages: tuple[float, ...]
    """By the recipe's estimator. If it gives each turn an advantage, this is the one of the turn
    whose advantage is the furthest from 0. 0 for a sample that is masked (`overlong = "mask"`),
    because nothing is learned from it."""
    tokens: tuple[int, ...]
    """Trainable tokens of this policy."""
    mean: float
    """Of the same rewards, those of left out samples included."""
    deviation: float
    """The population's standard deviation of the same rewards."""
    penalised: bool = False
    """Whether a sample has such a penalty, and the advantages follow from one reward of each
    sample: not from those of turns, or of several roles."""


REASON = re.compile("[a-z][a-z0-9_]{0,63}")
Filter = Callable[[Group], str | None]
"""Returns None to keep a group, or the reason to drop it: snake_case, at most 64 characters."""

FILTERS = {
    "zero_advantage": f"{__name__}:zero_advantage",
    "mean_reward": f"{__name__}:MeanReward",
}
"""The built-in filters by the recipe's name."""


def reason_of(name: str, drop: Filter, group: Group) -> str | None:
    """Returns the reason for which a filter drops a group; None if it keeps it.

    `name` is the recipe's name of the filter. Raises HeadraceError if it returns something else.
    """
    reason: object = drop(group)
    if reason is None:
        return None
    if not isinstance(reason, str) or REASON.fullmatch(reason) is None:
        raise HeadraceError(
            f"filter {name!r} returned {reason!r} for task {group.task}. Make it return None to "
            "keep a group, or the reason to drop it in snake_case"
        )
    return reason


def zero_advantage(group: Group) -> str | None:
    """Drops a group whose advantages are all 0, because the gradient of its loss is 0. Those of
    masked samples do not count.

    It also drops a group whose rewards differ only by their penalties for length
    (`overlong_penalty`). DAPO's dynamic sampling (arXiv 2503.14476), section 3.2, filters by the
    same rule: it keeps a group if some of its answers are right and some are wrong.
    """
    if group.penalised and group.deviation == 0:
        return "zero_advantage"
    return None if any(group.advantages) else "zero_advantage"


class MeanReward(Settings):
    """Drops a group whose mean reward is below `lowest` or above `highest`: the task is too hard or
    too easy. The reasons are `reward_too_low` and `reward_too_high`.

    The mean is that of the rewards without their penalties for length (`overlong_penalty`).
    """

    lowest: float | None = None
    """The lowest mean reward of a group that is kept. Absent: no limit."""
    highest: float | None = None
    """The highest mean reward of a group that is kept. Absent: no limit."""

    def __call__(self, group: Group) -> str | None:
        """Returns the reason, or None to keep the group."""
        if self.lowest is not None and not passes(group.mean, self.lowest):
            return "reward_too_low"
        if self.highest is not None and not passes(self.highest, group.mean):
            return "reward_too_high"
        return None
