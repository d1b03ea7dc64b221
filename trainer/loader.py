"""Loads the trajectories of a batch and divides them into minibatches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.schemas.events import BatchAssembled, BatchSample, Event, TrajectoryRecorded
from headrace.schemas.packed import unpack_f32
from headrace.services.log.event_log import Delivery, EventLog
from headrace.trainer.contract.training_batch import SampleOrigin
from headrace.trainer.critic.estimates import with_rewards
from headrace.trainer.metrics.batch_metrics import (
    drops,
    episode_metrics,
    staleness,
    trained_episodes,
)
from headrace.trainer.sequences import (
    SampleLabels,
    TokenSequence,
    UnusableBatch,
    UpdateBatch,
    token_sequences,
)


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch with its trajectories, ready for the learner."""

    delivery: Delivery[BatchAssembled]
    updates: Sequence[UpdateBatch] = ()
    """One for each minibatch."""
    unusable: str = ""
    """Why the batch can't be trained on; empty if it can."""
    dropped: Sequence[str] = ()
    """Why samples were dropped, one reason for each."""
    of_episodes: Mapping[str, float] = field(default_factory=dict)
    """The metrics of `episode_metrics`."""
    origins: Mapping[int, SampleOrigin] = field(default_factory=dict)
    """Where the samples that can be trained on come from, by their index in the batch."""

    def metrics(self) -> dict[str, float]:
        """Returns what is known before training.

        That is `reward_mean`, `dropped_samples`, which is a count, and the metrics of `drops`,
        `episode_metrics` and `staleness`.
        """
        batch = self.delivery.event
        known = {} if batch.reward_mean is None else {"reward_mean": batch.reward_mean}
        known["dropped_samples"] = float(len(self.dropped))
        return known | drops(batch) | staleness(batch, self.updates) | {**self.of_episodes}


async def load_batch(
    log: EventLog,
    delivery: Delivery[BatchAssembled],
    vocabulary: int,
    minibatches: int,
    passing: float = 1.0,
    taught: bool = False,
    critic: bool = False,
) -> PreparedBatch:
    """Fetches and checks a batch's trajectories, and divides them into at most so many minibatches.

    `passing` is the reward of a solved episode, for metrics, and `taught` says whether the policy
    has a teacher. A batch that contradicts itself, or that has no sample to train on, comes back as
    `unusable`. Raises what `EventLog.fetch` raises.
    """
    batch = delivery.event
    refs = [sample.trajectory for sample in batch.samples]
    # Sorted, so that neighbours in a partition need only one seek.
    order = sorted(range(len(refs)), key=lambda index: (refs[index].partition, refs[index].offset))
    fetched = await log.fetch([refs[index] for index in order])
    events = [event for _, event in sorted(zip(order, fetched, strict=True), key=lambda o: o[0])]
    try:
        built, dropped = await asyncio.to_thread(
            build_updates, batch, events, vocabulary, minibatches, taught, critic
        )
    except UnusableBatch as error:
        return PreparedBatch(delivery, unusable=str(error))
    trained = {one.sample for update in built for one in update.sequences}
    episodes = trained_episodes(batch, events, trained)
    origins = {
        index: SampleOrigin.of(batch.samples[index], event, batch.policy)
        for index, event in enumerate(events)
        if index in trained and isinstance(event, TrajectoryRecorded)
    }
    of_episodes = episode_metrics(episodes, passing)
    return PreparedBatch(delivery, built, "", dropped, of_episodes, origins)


def build_updates(
    batch: BatchAssembled,
    events: Sequence[Event],
    vocabulary: int,
    minibatches: int,
    taught: bool = False,
    critic: bool = False,
) -> tuple[list[UpdateBatch], list[str]]:
    """Divides a batch into minibatches, each of which makes an optimizer update in each epoch.

    `events` are its trajectories, one for each sample. Sample i belongs to minibatch i modulo
    `minibatches`. The samples of a group are neighbours, so they are spread evenly. A minibatch
    without trained tokens is left out. A sample whose trajectory can't be trained on, or is not
    what the batch states, is dropped: also returns the reasons. If the policy has a `critic`, the
    advantages of a sample are the rewards of its turns. Raises UnusableBatch if the batch
    contradicts itself or if no sample remains.
    """
    counted = sum(sample.tokens for sample in batch.samples)
    if batch.sampled_tokens != counted:
        raise UnusableBatch(
            f"batch {batch.version} states {batch.sampled_tokens} trainable tokens, but its "
            f"samples have {counted}"
        )
    by_sample: list[list[TokenSequence]] = []
    dropped: list[str] = []
    groups: dict[int, int] = {}
    """The index of each group, by its task."""
    for index, (sample, event) in enumerate(zip(batch.samples, events, strict=False)):
        group = groups.setdefault(sample.task, len(groups))
        name = f"task {sample.task} sample {sample.sample}"
        labels = SampleLabels(index, group, sample.use, name)
        try:
            found = _sequences(batch.policy, sample, event, vocabulary, taught, critic, labels)
        except (ValueError, UnusableBatch) as error:
            found = []
            dropped.append(f"{name}: {error}")
        by_sample.append(found)
    if dropped and len(dropped) == len(by_sample):
        raise UnusableBatch(
            f"none of the samples of batch {batch.version} can be trained on. {dropped[0]}"
        )
    parts = (by_sample[number::minibatches] for number in range(minibatches))
    divided = ([one for sequences in part for one in sequences] for part in parts)
    updates = [UpdateBatch(sequences, batch.version - 1) for sequences in divided if sequences]
    return updates, dropped


def _sequences(
    policy: str,
    sample: BatchSample,
    event: Event,
    vocabulary: int,
    taught: bool,
    critic: bool,
    labels: SampleLabels,
) -> list[TokenSequence]:
    """Returns a sample's sequences. Raises ValueError if they are not what the batch states."""
    if not isinstance(event, TrajectoryRecorded):
        raise ValueError(f"its reference names a {type(event).__name__}")
    if (event.task, event.sample) != (sample.task, sample.sample):
        raise ValueError(f"its reference names task {event.task} sample {event.sample}")
    advantages = unpack_f32(sample.advantages)
    given = (1.0,) if critic else advantages
    sequences = token_sequences(event, policy, given, sample.weight, vocabulary, taught, labels)
    if critic:
        sequences = with_rewards(sequences, event, policy, advantages)
    tokens = sum(len(one.positions) for one in sequences)
    if tokens != sample.tokens:
        raise ValueError(
            f"the trajectory has {tokens} trainable tokens, the batch states {sample.tokens}"
        )
    return sequences
