"""Filters: reasons not to train on a group. What they drop is recorded; its reward still counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.services.base.plugins import Loader


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one task that count, as one policy's training sees them."""

    task: int
    policy: str
    item_id: str
    epoch: int
    rewards: tuple[float, ...]
    """One a sample; at least one."""
    advantages: tuple[float, ...]
    """One a sample, by the recipe's estimator."""
    tokens: tuple[int, ...]
    """Trainable tokens of this policy, one a sample."""
    mean: float
    deviation: float
    """Of the rewards, over the whole group (population)."""


Filter = Callable[[Group], str | None]
"""The reason to drop a group, or None to keep it."""

FILTERS: dict[str, Loader] = {"zero_advantage": lambda: zero_advantage}
"""The built-in filters by the recipe's name."""


def zero_advantage(group: Group) -> str | None:
    """Drops a group whose advantages are all 0: its gradient is 0, whatever the policy.

    The filter behind DAPO's dynamic sampling (arXiv 2503.14476), section 3.2.
    """
    return None if any(group.advantages) else "zero_advantage"
