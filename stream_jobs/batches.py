"""Decides which groups make batch n, and when. No I/O, no clock.

Batch n trains version n, so the staleness of its samples is known exactly: n - 1 minus the version
of a sample's oldest token. Demonstrated samples have no version and are never stale. Batch n may be
assembled when n - 1 is at most `prefetch` ahead of the newest published version. It is due when
enough groups are waiting, or `batch_wait_s` after the first waiting task ended; then it may be
short, or empty. An evaluation task is decided by the next batch, but makes no batch due.

Every batch states which tasks it and all batches before it decided. So it is result and checkpoint
in one record: after a crash, `on_batch` with the last batch and `on_group` with all groups from its
`groups_read` rebuild this state. A group that was decided already is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    Dropped,
    GroupClosed,
    GroupSample,
    PolicyPublished,
    Run,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import MAX_RECORD_BYTES
from headrace.stream_jobs.groups import EVALUATE

BATCH_BYTES = MAX_RECORD_BYTES // 2
"""Limit for one batch's content. The other half is for the runs decided above the low mark."""
_SAMPLE_BYTES = 96
"""Upper bound of a sample's Avro encoding in bytes, without topic name and advantages."""
_DROPPED_BYTES = 20
"""Upper bound of a Dropped's Avro encoding in bytes, without its reason."""


@dataclass(frozen=True, slots=True)
class _WaitingGroup:
    """A group that no batch has decided yet, as the next batch sees it."""

    group: GroupClosed
    offset: int
    fresh: tuple[GroupSample, ...]
    """The samples that are not too stale for the next batch."""
    dropped: tuple[Dropped, ...]
    """What the next batch leaves out of the group."""
    size: int
    """The most bytes that the group takes in a batch."""


class BatchAssembler:
    """Groups and published versions of one policy in; batch n out, with its frontier."""

    def __init__(
        self, recipe: Recipe, policy: str, recorded: Mapping[int, int] | None = None
    ) -> None:
        """`recorded` is for a replay: for each task, the newest batch's version when the recorded
        run decided the task. With it, samples are as stale as they were then."""
        self._policy = policy
        self._recorded = recorded or {}
        self._digest = recipe.digest
        self._settings = recipe.policies[policy].batches
        self._version = 0
        self._published: int | None = None
        self._frontier = Frontier()
        self._waiting: dict[int, _WaitingGroup] = {}
        self._next_offset = 0

    @property
    def version(self) -> int:
        """The newest batch's version; 0 before the first."""
        return self._version

    @property
    def groups_read(self) -> int:
        """Offset of the oldest open group, or of the next group to read. Recovery reads from it."""
        offsets = (waiting.offset for waiting in self._waiting.values())
        return min(offsets, default=self._next_offset)

    @property
    def due_at(self) -> float | None:
        """When a batch is due even if it is short, in epoch seconds.

        None if no waiting group makes a batch due, or if none may be assembled yet.
        """
        groups = [one.group for one in self._waiting.values() if one.group.reason != EVALUATE]
        if not groups or not self._may_assemble():
            return None
        first = min(group.ended for group in groups) / 1000
        return first + self._settings.batch_wait_s

    def on_group(self, group: GroupClosed, offset: int) -> None:
        """Adds a group, unless its task is decided or has a waiting group already."""
        self._next_offset = max(self._next_offset, offset + 1)
        if group.task not in self._frontier and group.task not in self._waiting:
            self._waiting[group.task] = self._judge(group, offset)

    def on_policy(self, published: PolicyPublished) -> None:
        """Notes a published version. Ignores other policies."""
        if published.policy == self._policy:
            self._published = max(self._published or 0, published.version)

    def on_batch(self, batch: BatchAssembled) -> None:
        """Notes what a batch decided: one that was just written, or on recovery the last one.

        Ignores a batch that is not newer than the newest one.
        """
        if batch.policy != self._policy or batch.version <= self._version:
            return
        self._version = batch.version
        self._frontier = batch.frontier()
        self._next_offset = max(self._next_offset, batch.groups_read)
        self._waiting = {
            task: self._judge(waiting.group, waiting.offset)
            for task, waiting in self._waiting.items()
            if task not in self._frontier
        }

    def next_batch(self, now_s: float) -> BatchAssembled | None:
        """Returns the batch that is due now, or None. The state changes only with `on_batch`.

        `now_s` is in epoch seconds. The same inputs give the same batch, byte for byte.
        """
        if not self._waiting or not self._may_assemble():
            return None
        trainable = [waiting for waiting in self._waiting.values() if waiting.fresh]
        due_at = self.due_at
        if len(trainable) < self._settings.groups and (due_at is None or now_s < due_at):
            return None
        trainable.sort(key=self._order)
        unfit = [waiting for waiting in self._waiting.values() if not waiting.fresh]
        unfit.sort(key=lambda waiting: waiting.offset)
        chosen = list(_fitting(trainable[: self._settings.groups], BATCH_BYTES))
        room = BATCH_BYTES - sum(waiting.size for waiting in chosen)
        return self._assemble(chosen, list(_fitting(unfit, room)))

    def _may_assemble(self) -> bool:
        return (
            self._published is not None
            and self._version - self._published <= self._settings.prefetch
        )

    def _judge(self, group: GroupClosed, offset: int) -> _WaitingGroup:
        """Returns the group as the next batch sees it."""
        fresh: list[GroupSample] = []
        dropped: list[Dropped] = []
        newest = self._recorded.get(group.task, self._version)
        for sample in group.samples:
            behind = newest - sample.oldest_version
            if behind > self._settings.max_staleness and sample.oldest_version >= 0:
                dropped.append(Dropped(task=group.task, sample=sample.sample, reason="stale"))
            else:
                fresh.append(sample)
        if group.verdict == "dropped":
            fresh, dropped = [], [Dropped(task=group.task, reason=group.reason)]
        elif not fresh:
            dropped = [Dropped(task=group.task, reason="stale")]
        size = _size(fresh, dropped)
        if size > BATCH_BYTES:
            fresh, dropped = [], [Dropped(task=group.task, reason="too_large")]
            size = _size(fresh, dropped)
        return _WaitingGroup(group, offset, tuple(fresh), tuple(dropped), size)

    def _order(self, waiting: _WaitingGroup) -> tuple[int, int, int]:
        if self._settings.order == "fifo":
            return (waiting.offset, 0, 0)
        oldest = min(sample.oldest_version for sample in waiting.fresh)
        return (oldest, waiting.group.ended, waiting.offset)

    def _assemble(
        self, chosen: Sequence[_WaitingGroup], unfit: Sequence[_WaitingGroup]
    ) -> BatchAssembled:
        version = self._version + 1
        deciding = [*chosen, *unfit]
        frontier = Frontier(self._frontier.low_mark, self._frontier.runs)
        for waiting in deciding:
            frontier.add(waiting.group.task)
        still_open = [
            waiting.offset for task, waiting in self._waiting.items() if task not in frontier
        ]
        samples = tuple(_batch_samples(chosen))
        means = [
            waiting.group.mean
            for waiting in deciding
            # The mean of a group that another program wrote may be any float.
            if waiting.group.mean is not None and isfinite(waiting.group.mean)
        ]
        return BatchAssembled(
            policy=self._policy,
            version=version,
            recipe=self._digest,
            seed=_seed(self._digest, self._policy, version),
            samples=samples,
            dropped=tuple(dropped for waiting in deciding for dropped in waiting.dropped),
            sampled_tokens=sum(sample.tokens for sample in samples),
            reward_mean=fmean(means) if means else None,
            low_mark=frontier.low_mark,
            decided=tuple(Run(first=first, last=last) for first, last in frontier.runs),
            groups_read=min(still_open, default=self._next_offset),
        )


def _batch_samples(chosen: Iterable[_WaitingGroup]) -> Iterator[BatchSample]:
    for waiting in chosen:
        for sample in waiting.fresh:
            # `weight` (1) and `use` (0: not a replay) keep their defaults. They are for other
            # writers of batches: the trainer applies `weight`, and `show` prints `use`.
            yield BatchSample(
                task=waiting.group.task,
                sample=sample.sample,
                trajectory=sample.trajectory,
                advantages=sample.advantages,
                tokens=sample.tokens,
                longest=sample.longest,
                oldest_version=sample.oldest_version,
            )


def _fitting(waiting: Iterable[_WaitingGroup], room: int) -> Iterator[_WaitingGroup]:
    """Yields groups in order until one does not fit into `room` bytes any more."""
    for group in waiting:
        room -= group.size
        if room < 0:
            return
        yield group


def _size(samples: Iterable[GroupSample], dropped: Iterable[Dropped]) -> int:
    return sum(
        _SAMPLE_BYTES + len(sample.trajectory.topic) + len(sample.advantages) for sample in samples
    ) + sum(_DROPPED_BYTES + len(drop.reason.encode()) for drop in dropped)


def _seed(digest: bytes, policy: str, version: int) -> int:
    """Returns 63 bits that depend only on the recipe, the policy and the version.

    They are for other trainers; Headrace's own trainer does not use them.
    """
    text = digest + f"/{policy}/{version}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1
