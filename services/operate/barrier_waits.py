"""Who waits at the version barrier for whom, and what people should do if that lasts.

A pure fold over batches and publications, in any order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.schemas.events import BatchAssembled, Event, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.version_barrier import is_ahead, others_of
from headrace.stream_jobs.groups import EVALUATE

LONG_S = 600.0
"""Seconds after which a wait is worth a hint. A batch rarely takes longer."""


@dataclass
class _Policy:
    """What is known of one policy of the set."""

    version: int = -1
    published_at: float = 0.0
    batch: int = 0
    samples: int = 0
    """Number of samples in the newest batch."""
    reason: str = ""
    """The most frequent reason for which the newest batch drops a group."""
    dropped: int = 0
    """Number of groups and single samples that the newest batch drops, without evaluations."""


class BarrierWaits:
    """Folds events. All times are epoch seconds."""

    def __init__(self, recipe: Recipe) -> None:
        self._barrier = recipe.barrier
        learning = (name for name in recipe.policies if others_of(recipe, name))
        self._policies = {name: _Policy() for name in learning}
        self._newest_at = 0.0

    def on_event(self, event: Event, at: float) -> None:
        """Adds an event that was recorded at `at`."""
        self._newest_at = max(self._newest_at, at)
        if not isinstance(event, BatchAssembled | PolicyPublished):
            return
        policy = self._policies.get(event.policy)
        if policy is None:
            return
        if isinstance(event, PolicyPublished):
            if event.version > policy.version:
                policy.version, policy.published_at = event.version, at
        elif event.version > policy.batch:
            reasons = Counter(one.reason for one in event.dropped if one.reason != EVALUATE)
            policy.batch, policy.samples = event.version, len(event.samples)
            policy.dropped = reasons.total()
            policy.reason = max(reasons, key=lambda one: (reasons[one], one), default="")

    def hints(self) -> list[str]:
        """Returns a hint if policies wait for one that gets nothing to train on, or wait long."""
        if self._barrier is None:
            return []
        slow = min(self._policies, key=lambda name: self._policies[name].version)
        one, ahead = self._policies[slow], self._barrier.versions
        waiting = {
            name: other
            for name, other in self._policies.items()
            if name != slow and is_ahead(other.version + 1, one.version, ahead)
        }
        if one.version < 0 or not waiting:
            return []
        since = max(one.published_at, min(other.published_at for other in waiting.values()))
        minutes = (self._newest_at - since) / 60
        names = " and ".join(sorted(waiting))
        waits = f"{names} wait{'s' if len(waiting) == 1 else ''} at the barrier for {slow}"
        change = (
            f"Change the filters, the rewards or the tasks of {slow}, or remove it from "
            "barrier.policies"
        )
        if one.dropped and not one.samples:
            return [
                f"{waits}, and the newest batch of {slow} has nothing to train on: its "
                f"{one.dropped} groups were dropped, most of them for {one.reason!r}. {change}"
            ]
        if minutes * 60 < LONG_S:
            return []
        if one.batch > one.version:
            why = f"its trainer has not published version {one.version + 1}. See whether it runs"
        else:
            why = (
                f"it has too few groups for a batch. `headrace tail groups.{slow}` shows why they "
                f"are dropped. {change}"
            )
        return [f"{waits}, for {minutes:.0f} minutes now: {why}"]
