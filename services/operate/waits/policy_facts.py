"""What is known of one policy of a live run: its groups, its batches and its versions. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.policy_room import PolicyRoom
from headrace.stream_jobs.groups import EVALUATE

MOST_GROUPS = 20_000
MOST_BATCHES = 16
"""Batches whose times are known, the newest ones: more than may wait for the trainer."""


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A group that no batch has decided."""

    at: float
    reason: str
    """Why it was dropped. Empty: it was scored."""


class PolicyFacts:
    """Folds the events of one policy."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        policy = recipe.policies[name]
        self.trained = policy.training is not None
        self.needed = policy.batches.fresh_groups
        """Groups of a full batch."""
        self.version = -1
        self.published_at = 0.0
        self.step_s = 0.0
        """Seconds that the newest version's training took."""
        self.newest: PolicyPublished | None = None
        self.batch = 0
        self.batch_at = 0.0
        self.batch_times: dict[int, float] = {}
        """When the newest batches were made, by version."""
        self.batch_samples = -1
        """Samples of the newest batch. -1 before the first one."""
        self.batch_dropped: Counter[str] = Counter()
        """Reasons for which the newest batch drops groups or samples, without evaluations."""
        self.decided = Frontier()
        self.groups: dict[int, ClosedGroup] = {}
        """By task: those that no batch has decided."""
        self.room = (
            PolicyRoom(policy.batches, recipe.tasks.samples * recipe.tasks.max_tokens)
            if self.trained
            else None
        )

    @property
    def scored(self) -> int:
        """How many groups wait for a batch that may be trained on."""
        return sum(not one.reason for one in self.groups.values())

    def dropped(self) -> Counter[str]:
        """Returns why groups were dropped since the newest batch."""
        return Counter(one.reason for one in self.groups.values() if one.reason)

    def on_start(self, task: int) -> None:
        """Notes that a task was started, which trains."""
        if self.room is not None:
            self.room.start(task)

    def on_event(self, event: GroupClosed | BatchAssembled | PolicyPublished, at: float) -> None:
        """Adds an event of this policy."""
        match event:
            case GroupClosed():
                self._on_group(event, at)
            case BatchAssembled():
                self._on_batch(event, at)
            case PolicyPublished():
                self._on_version(event, at)

    def _on_group(self, group: GroupClosed, at: float) -> None:
        if group.reason == EVALUATE or group.task in self.decided:
            return
        if len(self.groups) < MOST_GROUPS:
            self.groups.setdefault(group.task, ClosedGroup(at, group.reason))
        if self.room is None:
            return
        if group.verdict == "dropped":
            self.room.drop(group.task)
        else:
            oldest = min((one.oldest_version for one in group.samples), default=-1)
            self.room.close(group.task, oldest, sum(one.tokens for one in group.samples))

    def _on_batch(self, batch: BatchAssembled, at: float) -> None:
        if batch.version <= self.batch:
            return
        self.batch, self.batch_at = batch.version, at
        self.batch_times = {**self.batch_times, batch.version: at}
        while len(self.batch_times) > MOST_BATCHES:
            self.batch_times.pop(min(self.batch_times))
        self.batch_samples = len(batch.samples)
        self.batch_dropped = Counter(one.reason for one in batch.dropped if one.reason != EVALUATE)
        self.decided = batch.frontier()
        self.groups = {task: one for task, one in self.groups.items() if task not in self.decided}
        if self.room is not None:
            self.room.on_batch(batch.version, self.decided, batch.samples)

    def _on_version(self, published: PolicyPublished, at: float) -> None:
        if published.version < self.version:
            return
        if published.version > self.version:
            self.published_at = at
        self.version, self.newest = published.version, published
        if published.status == "trained":
            self.step_s = published.step_s
        if self.room is not None:
            self.room.published = published.version
            if published.status == "skipped":
                self.room.skip(published.version)
