"""The groups that no batch has decided yet, and what the next batch can do with each. No I/O.

A group is trained whole or dropped whole, because its advantages belong together. Demonstrated
samples stand alone, and are never stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

from headrace.schemas.events import BatchSample, Dropped, GroupClosed, GroupSample
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.batch_settings import Batches
from headrace.schemas.staleness import Staleness
from headrace.schemas.topics import MAX_RECORD_BYTES
from headrace.stream_jobs.groups import EVALUATE

BATCH_BYTES = MAX_RECORD_BYTES // 2
"""Limit for one batch's content. The other half is for the runs decided above the low mark."""
_SAMPLE_BYTES = 96
"""Upper bound of a sample's Avro encoding in bytes, without topic name and advantages."""
_DROPPED_BYTES = 20
"""Upper bound of a Dropped's Avro encoding in bytes, without its reason."""


T = TypeVar("T")


@dataclass(frozen=True)
class WaitingGroup:
    """A group that no batch has decided yet, as the next batch sees it."""

    group: GroupClosed
    offset: int
    fresh: tuple[GroupSample, ...]
    """The samples that the next batch can train on."""
    dropped: tuple[Dropped, ...]
    """What the next batch leaves out of the group."""
    slack: int
    """In how many batches after the next one it can still be trained."""
    size: int
    """The most bytes that the group takes in a batch."""

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that the next batch can train on."""
        return sum(sample.tokens for sample in self.fresh)

    @cached_property
    def shown(self) -> bool:
        """Whether the next batch can train on a demonstration of it."""
        return any(sample.oldest_version < 0 for sample in self.fresh)

    def without_samples(self, reason: str) -> WaitingGroup:
        """Returns the group as one that the next batch drops."""
        dropped = (Dropped(task=self.group.task, reason=reason),)
        return replace(self, fresh=(), dropped=dropped, size=size_of((), dropped))


class WaitingGroups:
    """The waiting groups of one policy by task."""

    def __init__(
        self, settings: Batches, staleness: Staleness, recorded: Mapping[int, int]
    ) -> None:
        """`recorded` is as in `BatchAssembler`."""
        self._settings = settings
        self._staleness = staleness
        self._recorded = recorded
        self._waiting: dict[int, WaitingGroup] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, task: int) -> bool:
        return task in self._waiting

    def __iter__(self) -> Iterator[WaitingGroup]:
        return iter(self._waiting.values())

    def add(self, group: GroupClosed, offset: int, newest: int) -> None:
        """Adds a group. `newest` is the newest batch's version."""
        self._waiting[group.task] = self._judge(group, offset, newest)

    def judge_again(self, newest: int, decided: Frontier) -> None:
        """Judges all groups for the batch after `newest`, and removes those that are decided."""
        self._waiting = {
            task: self._judge(waiting.group, waiting.offset, newest)
            for task, waiting in self._waiting.items()
            if task not in decided
        }

    def groups_read(self, next_offset: int, decided: Frontier) -> int:
        """Returns the offset of the oldest group that is not in `decided`, or `next_offset`."""
        offsets = (one.offset for task, one in self._waiting.items() if task not in decided)
        return min(offsets, default=next_offset)

    def trainable(self) -> bool:
        """Whether a task waits that makes a batch due."""
        return any(waiting.group.reason != EVALUATE for waiting in self)

    def fresh(self) -> list[WaitingGroup]:
        """Returns the groups that the next batch can train on, those that it takes first first."""
        return self.in_order(one for one in self if one.fresh)

    def in_order(self, groups: Iterable[WaitingGroup]) -> list[WaitingGroup]:
        """Returns groups in the order in which a batch takes them."""
        return sorted(groups, key=self._order)

    def unfit(self) -> list[WaitingGroup]:
        """Returns the groups that the next batch drops, in log order."""
        return sorted((one for one in self if not one.fresh), key=lambda one: one.offset)

    def slack(self, version: int, newest: int) -> int:
        """Returns in how many batches after the next one tokens of a version can be trained."""
        return self._settings.max_staleness - self._staleness.behind(version, newest)

    def _judge(self, group: GroupClosed, offset: int, newest: int) -> WaitingGroup:
        """Returns the group as the next batch sees it."""
        newest = self._recorded.get(group.task, newest)
        fresh, dropped = group.samples, list[Dropped]()
        slack = self._settings.max_staleness - max(
            (self._staleness.behind(sample.oldest_version, newest) for sample in fresh), default=0
        )
        if group.verdict == "dropped":
            fresh, dropped = (), [Dropped(task=group.task, reason=group.reason)]
        elif slack < 0:
            # The advantages of sampled tokens belong together. Demonstrations stand alone.
            fresh = tuple(sample for sample in group.samples if sample.oldest_version < 0)
            stale = [sample.sample for sample in group.samples if sample.oldest_version >= 0]
            dropped = [Dropped(task=group.task, sample=one, reason="stale") for one in stale]
            if not fresh:
                dropped = [Dropped(task=group.task, reason="stale")]
        size = size_of(fresh, dropped)
        if size > BATCH_BYTES:
            fresh, dropped = (), [Dropped(task=group.task, reason="too_large")]
            size = size_of(fresh, dropped)
        return WaitingGroup(group, offset, fresh, tuple(dropped), slack, size)

    def _order(self, waiting: WaitingGroup) -> tuple[int, int, int]:
        if self._settings.order == "fifo":
            return (waiting.offset, 0, 0)
        # Demonstrations are never stale, and are to be learned first.
        return (-1 if waiting.shown else waiting.slack, waiting.group.ended, waiting.offset)


def fitting(
    groups: Iterable[T], taken: int = 0, size: Callable[[T], int] = attrgetter("size")
) -> Iterator[T]:
    """Yields groups in order until one does not fit into a batch that has `taken` bytes."""
    for group in groups:
        taken += size(group)
        if taken > BATCH_BYTES:
            return
        yield group


def size_of(samples: Iterable[GroupSample | BatchSample], dropped: Iterable[Dropped] = ()) -> int:
    """Returns the most bytes that samples, and what is dropped, take in a batch."""
    return sum(
        _SAMPLE_BYTES + len(sample.trajectory.topic) + len(sample.advantages) for sample in samples
    ) + sum(_DROPPED_BYTES + len(drop.reason.encode()) for drop in dropped)
