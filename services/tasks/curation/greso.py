"""GRESO: skips items whose groups have had equal rewards, with a chance that adapts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, PrivateAttr

from headrace.schemas.events import GroupClosed
from headrace.schemas.recipe.tables import NotNegative, Positive
from headrace.services.tasks.curation.curator import Curator, Share
from headrace.services.tasks.curation.item_statistics import ItemRecord

KINDS = ("easy", "hard")
LEAST = 1e-3
"""The smallest chance of an item. With a smaller one, a data set of a few items that are all easy
or all hard would seem exhausted."""


class Greso(Curator):
    """Skips items whose newest groups all had equal rewards, because nothing is learned from them.

    After `streak` such groups in a row, an item is accepted with the chance p to the power of
    `streak`. There is one p for easy items (all samples of the newest group passed) and one for
    hard items. Each of them adapts: after every `window` groups, p falls by `step` if more groups
    of its kind than its target had equal rewards, and rises by `step` if not. An accepted item
    ends its streak as soon as its rewards differ. The rule is that of GRESO (arXiv 2506.02177).
    """

    easy_target: Share = 0.083
    """The share of groups with equal rewards of easy items at which p stays."""
    hard_target: Share = 0.167
    """The share of groups with equal rewards of hard items at which p stays."""
    start: float = Field(default=0.5, gt=0, le=1)
    """Both p at the beginning."""
    step: Share = 0.01
    """How much p changes."""
    easy_floor: float = Field(default=0.05, gt=0, le=1)
    """The smallest p of easy items."""
    hard_floor: float = Field(default=0.05, gt=0, le=1)
    """The smallest p of hard items. A higher one tries more often what is too hard now."""
    window: Positive = 64
    """Number of groups after which p changes. The paper takes those of a step."""
    warmup_epochs: NotNegative = 1
    """Number of groups of an item before it may be skipped, and of epochs in which both p stay."""

    _p: dict[str, float] = PrivateAttr(default_factory=dict)
    _equal: dict[str, int] = PrivateAttr(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Groups of this window with equal rewards, by kind."""
    _groups: int = PrivateAttr(default=0)
    """Groups of this window."""

    def model_post_init(self, context: Any) -> None:
        """Begins with `start`."""
        self._p = {
            "easy": max(self.start, self.easy_floor),
            "hard": max(self.start, self.hard_floor),
        }

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        """Returns p to the power of the streak, but at least LEAST."""
        if item is None or item.groups < self.warmup_epochs:
            return 1.0
        return max(LEAST, self._p["easy" if item.solved else "hard"] ** item.streak)

    def on_group(self, group: GroupClosed) -> None:
        """Counts the group, and adapts both p at the end of a window."""
        if group.epoch < self.warmup_epochs or group.rewarded < 2:
            return
        self._groups += 1
        if group.deviation == 0:
            self._equal["easy" if group.passed == group.rewarded else "hard"] += 1
        if self._groups >= self.window:
            self._adapt("easy", self.easy_target, self.easy_floor)
            self._adapt("hard", self.hard_target, self.hard_floor)
            self._groups = 0

    def _adapt(self, kind: str, target: float, floor: float) -> None:
        too_many = self._equal[kind] / self._groups >= target
        change = -self.step if too_many else self.step
        self._p[kind] = min(1.0, max(floor, self._p[kind] + change))
        self._equal[kind] = 0

    def state(self) -> dict[str, Any]:
        """Returns both p, and the counts of the window."""
        return {"p": dict(self._p), "equal": dict(self._equal), "groups": self._groups}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with both p and the counts of the window."""
        self._p, self._equal = dict(state["p"]), dict(state["equal"])
        self._groups = state["groups"]
