"""From a batch's references to what the learner trains on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.schemas.events import BatchAssembled, Event, Ref, TrajectoryRecorded
from headrace.schemas.packed import unpack_f32
from headrace.services.log.event_log import Delivery, EventLog
from headrace.trainer.plan import plan
from headrace.trainer.sequences import TokenSequence, UnusableBatch, UpdateBatch, token_sequences


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with its trajectories, ready for the learner."""

    batch: BatchAssembled
    ref: Ref
    offset: int
    updates: Sequence[UpdateBatch] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Known before training: reward_mean, staleness_mean, staleness_max."""
    unusable: str = ""
    """Why it can't be trained on; else empty."""


def unusable_batch(delivery: Delivery[BatchAssembled], why: str) -> PreparedBatch:
    """A batch that can't be trained on."""
    batch = delivery.event
    return PreparedBatch(
        batch, delivery.ref, delivery.offset, metrics=_metrics(batch), unusable=why
    )


def _metrics(batch: BatchAssembled) -> dict[str, float]:
    return {} if batch.reward_mean is None else {"reward_mean": batch.reward_mean}


async def load_batch(
    log: EventLog, delivery: Delivery[BatchAssembled], vocabulary: int, updates: int
) -> PreparedBatch:
    """Fetches and checks a batch's trajectories, one rank's worth: all of them.

    Raises what `EventLog.fetch` raises. A batch that contradicts itself comes back `unusable`.
    """
    batch = delivery.event
    refs = [sample.trajectory for sample in batch.samples]
    # Sorted: one seek a run of neighbours.
    order = sorted(range(len(refs)), key=lambda index: (refs[index].partition, refs[index].offset))
    fetched = await log.fetch([refs[index] for index in order])
    events = [event for _, event in sorted(zip(order, fetched, strict=True), key=lambda o: o[0])]
    try:
        prepared = await asyncio.to_thread(build_updates, batch, events, vocabulary, updates)
    except UnusableBatch as error:
        return unusable_batch(delivery, str(error))
    metrics = _metrics(batch) | staleness(batch, prepared)
    return PreparedBatch(batch, delivery.ref, delivery.offset, prepared, metrics)


def build_updates(
    batch: BatchAssembled, events: Sequence[Event], vocabulary: int, updates: int
) -> list[UpdateBatch]:
    """The batch's optimizer updates, from its trajectories in the order of its samples.

    UnusableBatch where batch and trajectories contradict one another.
    """
    if batch.sampled_tokens != sum(sample.tokens for sample in batch.samples):
        raise UnusableBatch(
            f"batch {batch.version} counts {batch.sampled_tokens} tokens, its samples others"
        )
    by_sample = [_sequences(batch, index, event, vocabulary) for index, event in enumerate(events)]
    return [
        UpdateBatch([one for index in update.ranks[0] for one in by_sample[index]], update.tokens)
        for update in plan(batch, ranks=1, updates=updates)
    ]


def _sequences(
    batch: BatchAssembled, index: int, event: Event, vocabulary: int
) -> list[TokenSequence]:
    sample = batch.samples[index]
    where = f"batch {batch.version}, task {sample.task} sample {sample.sample}"
    if not isinstance(event, TrajectoryRecorded):
        raise UnusableBatch(f"{where}: its reference is to a {type(event).__name__}")
    if (event.task, event.sample) != (sample.task, sample.sample):
        raise UnusableBatch(f"{where}: its reference is to task {event.task} sample {event.sample}")
    try:
        advantages = unpack_f32(sample.advantages)
    except ValueError as error:
        raise UnusableBatch(f"{where}: {error}") from error
    sequences = token_sequences(event, batch.policy, advantages, sample.weight, vocabulary)
    tokens = sum(len(one.places) for one in sequences)
    if tokens != sample.tokens:
        raise UnusableBatch(f"{where}: {tokens} trainable tokens, the batch says {sample.tokens}")
    return sequences


def staleness(batch: BatchAssembled, updates: Sequence[UpdateBatch]) -> dict[str, float]:
    """By how many versions the sampled tokens are behind the batch's start, version n - 1."""
    versions = [one.versions for update in updates for one in update.sequences]
    if not versions:
        return {}
    drawn = np.concatenate(versions)
    behind = batch.version - 1 - drawn[drawn >= 0]
    if not len(behind):
        return {}
    return {"staleness_mean": float(behind.mean()), "staleness_max": float(behind.max())}
