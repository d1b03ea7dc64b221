"""Which groups make batch n, and when. No I/O, no clock.

Batch n trains version n, so its staleness is known exactly: a sample's staleness is n - 1 less
the version of its oldest token; what was demonstrated has none, and is never stale. Batch n may be
assembled once n - 1 is at most `prefetch` ahead of the newest published version. It is made when
enough groups are decided, or `batch_wait_s` after the first task that is decided and in no batch
yet; then it may be short, or empty. A task to evaluate is decided by the next batch, and makes none
due.

Every batch says which tasks are decided by it and all before it. So it is result and checkpoint
at once: after a crash, `on_batch` with the last batch and `on_group` with all groups from its
`groups_read` rebuild this state, and a group seen again is ignored.
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
"""Most content of one batch; the other half is room for the runs decided above the low mark."""
_SAMPLE_BYTES = 96
"""Upper bound of a sample's Avro encoding without its topic's name and its advantages."""
_DROPPED_BYTES = 20
"""Upper bound of a Dropped's Avro encoding without its reason."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A group that is in no batch yet, as the next batch sees it."""

    group: GroupClosed
    offset: int
    fresh: tuple[GroupSample, ...]
    """The samples that are not too stale for the next batch."""
    dropped: tuple[Dropped, ...]
    """What a batch that decides the group leaves out."""
    size: int
    """Bytes that it takes in a batch, at most."""

    @property
    def ended_s(self) -> float:
        return self.group.ended / 1000


class BatchAssembler:
    """Groups and published versions of one policy in; batch n out, with its frontier."""

    def __init__(
        self, recipe: Recipe, policy: str, recorded: Mapping[int, int] | None = None
    ) -> None:
        """`recorded` is of tasks that another run decided, in a replay: the version which that
        run's trainer stood at. They are as stale as they were then."""
        self._policy = policy
        self._recorded = recorded or {}
        self._digest = recipe.digest
        self._settings = recipe.policies[policy].batches
        self._version = 0
        self._published: int | None = None
        self._frontier = Frontier()
        self._waiting: dict[int, _Waiting] = {}
        self._next_offset = 0

    @property
    def version(self) -> int:
        """The newest batch's version; 0 before the first."""
        return self._version

    @property
    def groups_read(self) -> int:
        """Offset of the oldest group read and undecided, or of the next: where recovery seeks."""
        offsets = (waiting.offset for waiting in self._waiting.values())
        return min(offsets, default=self._next_offset)

    @property
    def due_at(self) -> float | None:
        """When a batch is due even if short, in epoch seconds. None until more has happened."""
        waiting = [one for one in self._waiting.values() if one.group.reason != EVALUATE]
        if not waiting or not self._may_assemble():
            return None
        first = min(one.ended_s for one in waiting)
        return first + self._settings.batch_wait_s

    def on_group(self, group: GroupClosed, offset: int) -> None:
        """Takes a group in; of two for one task the first counts, and a decided task is ignored."""
        self._next_offset = max(self._next_offset, offset + 1)
        if group.task not in self._frontier and group.task not in self._waiting:
            self._waiting[group.task] = self._judge(group, offset)

    def on_policy(self, published: PolicyPublished) -> None:
        """Takes note of a published version; another policy's is ignored."""
        if published.policy == self._policy:
            self._published = max(self._published or 0, published.version)

    def on_batch(self, batch: BatchAssembled) -> None:
        """Takes over what a batch decided: one just written, or the last one, on recovery.

        A batch that is no newer than what is known changes nothing.
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
        """The batch that is due now, if one is. It counts once `on_batch` is told of it.

        `now_s` is in epoch seconds. The same inputs give the same batch, to the byte.
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

    def _judge(self, group: GroupClosed, offset: int) -> _Waiting:
        """The group as the batch after the newest sees it."""
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
        return _Waiting(group, offset, tuple(fresh), tuple(dropped), size)

    def _order(self, waiting: _Waiting) -> tuple[int, int, int]:
        if self._settings.order == "fifo":
            return (waiting.offset, 0, 0)
        oldest = min(sample.oldest_version for sample in waiting.fresh)
        return (oldest, waiting.group.ended, waiting.offset)

    def _assemble(self, chosen: Sequence[_Waiting], unfit: Sequence[_Waiting]) -> BatchAssembled:
        version = self._version + 1
        deciding = [*chosen, *unfit]
        frontier = Frontier(self._frontier.low_mark, self._frontier.runs)
        for waiting in deciding:
            frontier.add(waiting.group.task)
        undecided = [
            waiting.offset for task, waiting in self._waiting.items() if task not in frontier
        ]
        samples = tuple(_batch_samples(chosen))
        means = [
            waiting.group.mean
            for waiting in deciding
            # A group of another writer's may hold anything.
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
            groups_read=min(undecided, default=self._next_offset),
        )


def _batch_samples(chosen: Iterable[_Waiting]) -> Iterator[BatchSample]:
    for waiting in chosen:
        for sample in waiting.fresh:
            yield BatchSample(
                task=waiting.group.task,
                sample=sample.sample,
                trajectory=sample.trajectory,
                advantages=sample.advantages,
                tokens=sample.tokens,
                longest=sample.longest,
                oldest_version=sample.oldest_version,
            )


def _fitting(waiting: Iterable[_Waiting], room: int) -> Iterator[_Waiting]:
    """As many as fit into `room` bytes, in order."""
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
    """63 bits that follow from the recipe, the policy and the version alone."""
    text = digest + f"/{policy}/{version}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1
