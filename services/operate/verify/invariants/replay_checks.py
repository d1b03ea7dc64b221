"""I3 and I5 for replayed samples: of which group, how often, how old, and how many in a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from fractions import Fraction

from headrace.schemas.events import BatchAssembled, BatchSample
from headrace.schemas.recipe.batch_settings import Batches
from headrace.schemas.replay_pool import ReplayPool
from headrace.schemas.staleness import Staleness
from headrace.services.operate.verify.invariants.log_facts import Violations
from headrace.services.operate.verify.invariants.token_age import behind
from headrace.stream_jobs.waiting_groups import size_of

SMALL = 700
"""Bytes that fit into any batch, even if a simulation makes batches small."""


class Replays:
    """The samples that the batches of one policy have trained on so far."""

    def __init__(self, settings: Batches, skipped: Collection[int]) -> None:
        self._settings = settings
        self._skipped = skipped
        self._trained: dict[int, dict[int, list[tuple[int, BatchSample]]]] = {}
        """By task and sample: each batch's version, and the sample as it was there."""
        self._pool = ReplayPool(settings, Staleness(settings.prefetch, skipped))
        self._share = Fraction(0) if settings.replay is None else settings.replay.exact_share

    def on_batch(self, batch: BatchAssembled, name: str) -> Violations:
        """Judges the replayed samples of a batch. Batches come in the order of their versions."""
        counts = Counter((one.task, one.sample) for one in batch.samples)
        for (task, sample), count in counts.items():
            if count > 1:
                yield f"I3: {name}: {task}/{sample} is in it {count} times"
        replayed: dict[int, list[BatchSample]] = {}
        for one in batch.samples:
            if one.use > 0:
                replayed.setdefault(one.task, []).append(one)
        for task, samples in replayed.items():
            yield from self._group(batch.version, task, samples, f"{name}: replay of {task}")
        yield from self._quota(batch, len(replayed), name)
        yield from self._chosen(batch, list(replayed), name)
        for one in batch.samples:
            known = self._trained.setdefault(one.task, {})
            known.setdefault(one.sample, []).append((batch.version, one))

    def _group(self, version: int, task: int, samples: list[BatchSample], name: str) -> Violations:
        replay = self._settings.replay
        if replay is None:
            yield f"I3: {name}, but the recipe has no replay"
            return
        known = self._trained.get(task, {})
        whole = {one for one, uses in known.items() if uses[0][1].oldest_version >= 0}
        if whole != {one.sample for one in samples}:
            yield f"I5: {name} has a part of its samples: advantages belong together"
        for one in samples:
            uses = known.get(one.sample, [])
            if not uses:
                yield f"I3: {name}: sample {one.sample} was never fresh"
                continue
            expected = uses[0][1].model_copy(
                update={"use": len(uses), "weight": replay.weight ** len(uses)}
            )
            if one != expected:
                yield f"I3: {name}: sample {one.sample} is {one}, not {expected}"
            if len(uses) >= replay.max_uses:
                yield f"I3: {name}: sample {one.sample} is used {len(uses) + 1} times"
            batches = [number for number, _ in uses]
            if self._settings.prefetch >= version - batches[-1]:
                yield f"I5: {name} was in batch {batches[-1]}, which may be untrained"
            if again := sorted(set(batches) & set(self._skipped)):
                yield f"I5: {name} was in batch {again[0]}, which was skipped"
            old = behind(one.oldest_version, version - 1, self._settings.prefetch, self._skipped)
            if old > replay.max_age or version - batches[0] > replay.max_age:
                yield f"I5: {name}: sample {one.sample} is {old} versions behind"

    def _chosen(self, batch: BatchAssembled, replayed: list[int], name: str) -> Violations:
        """Whoever made the batch had the pool of one who saw all batches."""
        if self._settings.replay is None:
            return
        fresh = [one for one in batch.samples if one.use == 0]
        chosen = self._pool.chosen(len({one.task for one in fresh}))
        expected = [one.task for one in chosen]
        again = [sample for one in chosen for sample in one.samples]
        if size_of([*fresh, *again], batch.dropped) > SMALL:
            expected = expected[: len(replayed)]
        if replayed != expected:
            yield f"I9: {name} replays {replayed}, and all batches before it give {expected}"
        self._pool.on_batch(batch.version, batch.samples)

    def _quota(self, batch: BatchAssembled, replayed: int, name: str) -> Violations:
        """No batch replays more than its part of the share."""
        number, groups = batch.version, self._settings.groups
        before, after = (int(one * self._share * groups) for one in (number - 1, number))
        fresh = len({one.task for one in batch.samples if one.use == 0})
        most: Fraction | int = after - before
        if self._settings.tokens is not None:
            most = fresh * self._share / (1 - self._share) + 1
        if replayed > most:
            yield f"I3: {name} replays {replayed} groups, at most {most}"
