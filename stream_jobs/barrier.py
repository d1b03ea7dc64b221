"""What holds the batches of a policy at the version barrier. No I/O, no clock.

`schemas/version_barrier.py` has the rule. Here is its exception: a policy without work left holds
nobody. At the end of a run one policy may still have more batches to make than another. A policy
has work while a task is live, while a batch of it is not published, and while a group of it is
undecided. A policy at the barrier passes one without work only if nobody can go on but those who
wait at the barrier themselves, and if nothing happened for `batch_wait_s`, as for a short batch: no
task was started or closed, and the policy itself made no batch. So while tasks can still start, no
policy is passed. If new tasks come later, the policy waits for the other one again.

While a policy is held, tasks go on starting for the others, so groups pile up. Once they are more
than `ENOUGH_BATCHES` full batches, the next batch draws some of them and drops all others with
the reason `barrier`. It decides all of them, or if they do not fit into one batch, all up to some
offset. So a replay finds the same groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.schemas.events import BatchAssembled, EpisodeStarted, GroupClosed, PolicyPublished
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.version_barrier import is_ahead, others_of
from headrace.stream_jobs.groups import EVALUATE
from headrace.stream_jobs.live_groups import OVERDUE_S, longest_teacher_s

ENOUGH_BATCHES = 4
"""So many full batches of waiting groups are enough for a policy that the barrier held."""
PASSED_OVER = "barrier"
"""The reason to drop a group, because a policy that was held had more of them than it needs."""


@dataclass(eq=False, slots=True)
class _Other:
    """Another policy of the set."""

    published: int | None = None
    batch: int = 0
    decided: Frontier = field(default_factory=Frontier)
    live: dict[int, float] = field(default_factory=dict)
    """The started tasks whose group is not closed, and when each is overdue, in epoch seconds."""
    undecided: set[int] = field(default_factory=set)
    """The tasks whose closed group is in no batch yet."""

    def has_work(self, now_s: float, *, waits: bool) -> bool:
        """Whether it can go on. If it `waits` at the barrier, its groups don't help it."""
        in_flight = self.published is None or self.batch > self.published
        undecided = bool(self.undecided) and not waits
        return in_flight or undecided or any(now_s < at for at in self.live.values())


class Barrier:
    """What holds one policy: the versions, batches and groups of the others of its set."""

    def __init__(self, recipe: Recipe, policy: str) -> None:
        """Without a barrier in the recipe, or if the policy is in no set, it holds nothing."""
        self._versions = recipe.barrier.versions if recipe.barrier is not None else 0
        self._wait_s = recipe.policies[policy].batches.batch_wait_s
        self._policy = policy
        self._published: int | None = None
        self._others = {name: _Other() for name in others_of(recipe, policy)}
        self._asked = (0, 0.0)
        """The newest batch that it was asked about, and since when."""
        self._teacher_s = longest_teacher_s(recipe)
        self.held = 0
        """The newest batch that had to wait."""

    @property
    def others(self) -> tuple[str, ...]:
        """The names of the other policies of the set; empty if there is no barrier."""
        return tuple(self._others)

    def on_start(self, started: EpisodeStarted) -> None:
        """Notes that a task is live, if it is trained on."""
        if started.verdict is not None or started.submitted.purpose != "train":
            return
        overdue_s = started.deadline / 1000 + self._teacher_s + OVERDUE_S
        for other in self._others.values():
            if started.task not in other.decided and started.task not in other.undecided:
                other.live[started.task] = overdue_s

    def on_group(self, group: GroupClosed) -> None:
        """Notes a group of another policy."""
        other = self._others.get(group.policy)
        if other is not None:
            other.live.pop(group.task, None)
            if group.reason != EVALUATE and group.task not in other.decided:
                other.undecided.add(group.task)

    def on_batch(self, batch: BatchAssembled) -> None:
        """Notes a batch of another policy."""
        other = self._others.get(batch.policy)
        if other is not None and batch.version > other.batch:
            other.batch, other.decided = batch.version, batch.frontier()
            other.live = {one: at for one, at in other.live.items() if one not in other.decided}
            other.undecided = {one for one in other.undecided if one not in other.decided}

    def on_policy(self, published: PolicyPublished) -> None:
        """Notes a version of a policy of the set."""
        other = self._others.get(published.policy)
        if other is not None:
            other.published = max(published.version, other.published or 0)
        elif published.policy == self._policy:
            self._published = max(published.version, self._published or 0)

    def holds(self, version: int, now_s: float, changed_s: float) -> bool:
        """Whether a batch must wait. `changed_s`: when a task was started or closed last."""
        if version != self._asked[0]:
            self._asked = (version, now_s)
        behind = [other for other in self._others.values() if self._is_behind(other, version)]
        if not behind:
            return False
        quiet_s = max(changed_s, self._asked[1]) + self._wait_s
        waits = now_s < quiet_s or any(
            other.has_work(now_s, waits=other not in behind and self._waits(other))
            for other in self._others.values()
        )
        if waits:
            self.held = version
        return waits

    def _is_behind(self, other: _Other, version: int) -> bool:
        return is_ahead(version, other.published, self._versions)

    def _waits(self, other: _Other) -> bool:
        """Whether another policy waits at the barrier itself."""
        published = [one.published for one in self._others.values() if one is not other]
        return any(
            is_ahead(other.batch + 1, one, self._versions) for one in (self._published, *published)
        )

    def moments(self) -> Iterator[float]:
        """Yields when a live task of another policy is overdue, and when a batch waited enough."""
        yield self._asked[1] + self._wait_s
        for other in self._others.values():
            yield from other.live.values()
