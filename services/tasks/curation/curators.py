"""Curators: which items of a data set are worth a task. The recipe's `tasks.curators` names them.

A curator of your own is a class like these, named as `package.module:name`.
"""

from __future__ import annotations

from math import exp

from pydantic import Field

from headrace.errors import UsageError
from headrace.schemas.recipe.tables import Choice, Positive
from headrace.services.base.plugins import load_with_options
from headrace.services.tasks.curation.curator import Curator, Share
from headrace.services.tasks.curation.item_statistics import ItemRecord


class Uniform(Curator):
    """Accepts every item."""

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        """Returns 1."""
        return 1.0


class PassRate(Curator):
    """Drops an item for good if all of its episodes failed, or all passed.

    MegaFlow filters tasks by this rule before training. An item that was dropped is not tried
    again, so it doesn't come back when the policy has learned more: `greso` tries it again.
    """

    tries: Positive = 1
    """Number of groups of an item before it may be dropped."""
    episodes: Positive = 4
    """Number of its episodes with a reward before it may be dropped. In a group of which an
    environment hangs, few have one."""
    low: Share = 0.0
    """An item is dropped if its pass rate is this or lower."""
    high: Share = 1.0
    """An item is dropped if its pass rate is this or higher."""

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        """Returns 0 or 1."""
        if item is None or item.groups < self.tries or item.episodes < self.episodes:
            return 1.0
        return float(self.low < item.pass_rate < self.high)


class Difficulty(Curator):
    """Keeps to items of about the same difficulty: the further the recent pass rate of an item is
    from `target`, the smaller its chance, which is exp(-(distance / width)² / 2)."""

    target: Share = 0.5
    """The pass rate at which an item is always accepted."""
    width: float = Field(default=0.25, gt=0)
    """The distance at which its chance is 0.61. At twice this distance it is 0.14."""
    floor: Share = 0.02
    """The smallest chance, so that each item is tried again some time."""
    tries: Positive = 1
    """Number of groups of an item before its chance is below 1."""

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        """Returns the chance of the item's recent pass rate."""
        if item is None or item.groups < self.tries:
            return 1.0
        distance = (item.recent - self.target) / self.width
        return max(self.floor, exp(-distance * distance / 2))


CURATORS = {
    "uniform": Uniform,
    "pass_rate": PassRate,
    "greso": "headrace.services.tasks.curation.greso:Greso",
    "difficulty": Difficulty,
}
"""The built-in curators by the recipe's name."""


def load_curator(choice: Choice) -> Curator:
    """Returns a curator with its options. Raises UsageError if it can't be loaded."""
    curator = load_with_options("curator", choice, CURATORS)
    if not isinstance(curator, Curator):
        raise UsageError(f"curator {choice!r} is not a subclass of headrace.Curator. Make it one")
    return curator
