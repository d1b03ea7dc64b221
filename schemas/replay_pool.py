"""The groups of earlier batches that a batch may train on again. No I/O, no clock.

The pool is a function of the recorded batches, and of which versions were skipped. So batch
assembly and the scheduler know the same, and a restart rebuilds it from the last `max_age` batches.

A group is replayed whole, because its advantages belong together, and never with its demonstrated
samples. Batch n may replay a group if
- its newest batch is at most n - 1 - `prefetch`. Whether that version was skipped is known then;
- none of its batches was skipped: perhaps one of its samples was the reason;
- it has been in fewer than `max_uses` batches;
- its oldest token is at most `max_age` versions behind n - 1, and its first batch at least
  n - `max_age`.

Groups with the fewest uses go first, then those whose first batch is the newest, because the policy
has changed least since. Chance decides among the groups of a batch: their age would not be fair,
because it depends on how long their episodes took.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from headrace.schemas.events import BatchSample
from headrace.schemas.recipe.batch_settings import Batches
from headrace.schemas.staleness import Staleness

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: multiples of it, modulo 2**64, are spread evenly."""


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """The samples of a group that may be trained on again, as its newest batch had them."""

    samples: tuple[BatchSample, ...]
    batches: tuple[int, ...]
    """The versions of the batches that trained on it."""
    tokens: int
    """Number of trainable tokens."""

    @property
    def task(self) -> int:
        """Number of the task."""
        return self.samples[0].task

    @property
    def rank(self) -> tuple[int, int, bytes]:
        """Groups with a lower rank are replayed first."""
        chance = hashlib.sha256(f"{self.task}/{self.batches[-1]}".encode()).digest()
        return len(self.batches), -self.batches[0], chance

    def replayed(self, weight: float) -> tuple[BatchSample, ...]:
        """Returns the samples for another batch. `weight` is the factor for each replay."""
        use = len(self.batches)
        changes = {"use": use, "weight": weight**use}
        return tuple(sample.model_copy(update=changes) for sample in self.samples)


class ReplayPool:
    """What the next batch of one policy may replay, and how many groups it should."""

    def __init__(self, settings: Batches, staleness: Staleness) -> None:
        """`staleness` knows the skipped versions, and may learn more of them later."""
        self._settings = settings
        self._replay = settings.replay
        self._staleness = staleness
        self._newest = 0
        self._groups: dict[int, TrainedGroup] = {}
        self._candidates: list[TrainedGroup] = []
        self._known = (0, 0)
        """The newest batch, and the number of skips, for which the candidates were found."""

    def on_batch(self, version: int, trained: Iterable[BatchSample]) -> None:
        """Notes what batch `version` trains on. Batches come in the order of their versions."""
        if self._replay is None or version <= self._newest:
            return
        self._newest = version
        by_task: dict[int, list[BatchSample]] = {}
        for sample in trained:
            if sample.oldest_version >= 0:
                by_task.setdefault(sample.task, []).append(sample)
        for task, samples in by_task.items():
            known = self._groups.pop(task, None)
            if known is None and samples[0].use > 0:
                continue  # Its first batch is too long ago.
            batches = (*(known.batches if known else ()), version)
            if len(batches) < self._replay.max_uses:
                tokens = sum(sample.tokens for sample in samples)
                self._groups[task] = TrainedGroup(tuple(samples), batches, tokens)
        oldest = version + 1 - self._replay.max_age
        self._groups = {task: one for task, one in self._groups.items() if one.batches[0] >= oldest}

    def candidates(self) -> list[TrainedGroup]:
        """Returns the groups that the batch after the newest one may replay, best first."""
        known = (self._newest, self._staleness.skips)
        if known != self._known:
            self._known = known
            found = (one for one in self._groups.values() if self._may_replay(one))
            self._candidates = sorted(found, key=lambda one: one.rank)
        return self._candidates

    def _may_replay(self, group: TrainedGroup) -> bool:
        assert self._replay is not None
        oldest = min(sample.oldest_version for sample in group.samples)
        return (
            group.batches[-1] <= self._newest - self._settings.prefetch
            and self._staleness.behind(oldest, self._newest) <= self._replay.max_age
            and not any(map(self._staleness.skipped, group.batches))
        )

    def chosen(self, fresh: int) -> list[TrainedGroup]:
        """Returns the groups that the next batch replays beside `fresh` fresh ones."""
        return self.candidates()[: self._wanted(fresh)]

    def full_at(self, tokens: Sequence[int]) -> int | None:
        """Returns how many fresh groups fill the next batch. None if they do not fill it.

        `tokens` has the trainable tokens of each fresh group, those that go first first.
        """
        settings = self._settings
        if settings.tokens is None:
            fresh = settings.groups - len(self.chosen(settings.groups))
            return fresh if len(tokens) >= fresh else None
        total = 0
        for fresh, size in enumerate(tokens, 1):
            total += size
            replayed = self.chosen(fresh)
            enough = total + sum(one.tokens for one in replayed) >= settings.tokens
            if enough or fresh + len(replayed) >= settings.groups:
                return fresh
        return None

    def fresh_groups(self, batches: int) -> int:
        """Returns how many fresh groups the next `batches` batches have at most.

        It assumes that only the first of them may lack groups to replay.
        """
        missing = 0 if batches <= 0 else max(0, self._quota(1) - len(self.candidates()))
        return self._settings.groups * batches - self._quota(batches) + missing

    def _quota(self, batches: int) -> int:
        """How many groups the next `batches` batches replay, if they are full.

        Batch n of g groups has floor(n g share) - floor((n - 1) g share), so the mix is exact in
        the long run.
        """
        if self._replay is None or batches <= 0:
            return 0
        many, parts = self._replay.exact_share.as_integer_ratio()
        before, after = (
            number * self._settings.groups * many // parts
            for number in (self._newest, self._newest + batches)
        )
        return after - before

    def _wanted(self, fresh: int) -> int:
        """How many groups the next batch replays beside `fresh` fresh ones, at most.

        A smaller batch, because of `tokens` or because nothing more can come, has the same share on
        average.
        """
        quota, groups = self._quota(1), self._settings.groups
        if self._replay is None or (self._settings.tokens is None and fresh >= groups - quota):
            return quota
        share = self._replay.exact_share
        chance = Fraction((self._newest + 1) * GOLDEN % 2**64, 2**64)
        fitting = min(groups - fresh, floor(fresh * share / (1 - share) + chance))
        return max(0, fitting if self._settings.tokens else min(quota, fitting))
