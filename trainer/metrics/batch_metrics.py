"""Metrics of a batch that are known before it is trained on. docs/algorithms.md explains each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from headrace.schemas.events import BatchAssembled, Event, TrajectoryRecorded
from headrace.schemas.role_rewards import passes, policy_reward
from headrace.trainer.sequences import Ints, UpdateBatch

MOST_REASONS = 32
"""Reasons for dropped groups that are counted apart. A filter of a plug-in may make up any."""
NOT_DROPPED = frozenset({"evaluate"})
"""Reasons of groups that were never meant to be trained on."""
LIMITS = frozenset({"turn_limit", "token_limit", "overflow"})
"""The endings of an episode that a limit cut."""

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class TrainedEpisode:
    """An episode that a batch trains on and that the policy sampled itself."""

    task: int
    reward: float
    """The policy's own."""
    tokens: int
    """Number of trained tokens."""
    cut: bool
    """Whether a limit of turns, tokens or context cut it, or its last answer."""


def trained_episodes(
    batch: BatchAssembled, events: Sequence[Event], trained: Collection[int]
) -> list[TrainedEpisode]:
    """Returns the batch's fresh episodes that have a reward and that the policy sampled.

    `events` are the trajectories of its samples. `trained` are the indices of the samples that the
    trainer did not drop.
    """
    return [
        TrainedEpisode(sample.task, reward, sample.tokens, was_cut(event, batch.policy))
        for index, (sample, event) in enumerate(zip(batch.samples, events, strict=True))
        if index in trained and sample.oldest_version >= 0 and sample.use == 0
        if isinstance(event, TrajectoryRecorded)
        if (reward := policy_reward(event, batch.policy)) is not None
    ]


def was_cut(trajectory: TrajectoryRecorded, policy: str) -> bool:
    """Returns whether a limit cut the episode, or an answer of the policy that nothing continues.

    An answer of one token is whole: a policy that chooses an action has no more to say.
    """
    continued = {turn.parent for turn in trajectory.turns}
    last = [turn for index, turn in enumerate(trajectory.turns) if index not in continued]
    return trajectory.ending in LIMITS or any(
        turn.finish == "length" and len(turn.tokens) > TOKEN_BYTES
        for turn in last
        if turn.policy == policy
    )


def episode_metrics(episodes: Sequence[TrainedEpisode], passing: float) -> Mapping[str, float]:
    """Returns the metrics of the episodes that a batch trains on.

    `truncated` is the share of them that a limit cut. `groups` is the number of groups, and
    `groups_equal` is the share of them whose rewards are equal, among those with several episodes.
    `groups_solved_by_all` and
    `groups_solved_by_none` are shares of the groups: all or none of their trained episodes have a
    reward of at least `passing`. `length_better` and `length_worse` are the mean numbers of tokens
    of the episodes whose reward is above the mean of their group, and below it. So they compare
    episodes of equal tasks. A metric is absent if there is nothing to take the mean of.
    """
    if not episodes:
        return {}
    groups: dict[int, list[TrainedEpisode]] = {}
    for one in episodes:
        groups.setdefault(one.task, []).append(one)
    lengths: dict[str, list[int]] = {"length_better": [], "length_worse": []}
    for group in groups.values():
        rewards = [one.reward for one in group]
        if min(rewards) == max(rewards):
            continue  # The mean of equal numbers may differ from them by rounding.
        mean = fmean(rewards)
        for one in group:
            if one.reward != mean:
                name = "length_better" if one.reward > mean else "length_worse"
                lengths[name].append(one.tokens)
    solved = [{passes(one.reward, passing) for one in group} for group in groups.values()]
    several = [group for group in groups.values() if len(group) > 1]
    equal = [len({one.reward for one in group}) == 1 for group in several]
    return {
        "groups": float(len(groups)),
        **({"groups_equal": fmean(equal)} if equal else {}),
        "truncated": fmean(one.cut for one in episodes),
        "groups_solved_by_all": fmean(one == {True} for one in solved),
        "groups_solved_by_none": fmean(one == {False} for one in solved),
        **{name: fmean(tokens) for name, tokens in lengths.items() if tokens},
    }


def drops(batch: BatchAssembled) -> dict[str, float]:
    """Returns `dropped_groups_REASON`: how many groups the batch drops, by reason.

    A group of which only the demonstrated samples are left counts, too. Reasons beyond the most
    frequent 32 are left out.
    """
    reasons = {(one.task, one.reason) for one in batch.dropped if one.reason not in NOT_DROPPED}
    counted = Counter(reason for _, reason in sorted(reasons)).most_common(MOST_REASONS)
    return {f"dropped_groups_{reason}": float(count) for reason, count in counted}


def staleness(batch: BatchAssembled, updates: Sequence[UpdateBatch]) -> dict[str, float]:
    """Returns how many versions the sampled tokens are behind version n - 1.

    n is the version that the batch trains. `staleness_mean` and `staleness_max` are over tokens,
    and `staleness_oldest` is the mean over samples of their oldest token. All three are of fresh
    samples. `staleness_replayed` is the mean over replayed samples of their oldest token, and
    `replayed` the share of replayed samples. A metric is absent if there are no such tokens.
    """
    behind: dict[bool, dict[int, list[Ints]]] = {False: {}, True: {}}
    for one in (one for update in updates for one in update.sequences):
        versions = one.versions[one.versions >= 0]
        if len(versions):
            found = behind[one.use > 0].setdefault(one.sample, [])
            found.append(batch.version - 1 - versions)
    fresh, replayed = (
        [np.concatenate(parts) for parts in behind[again].values()] for again in (False, True)
    )
    metrics: dict[str, float] = {}
    if fresh:
        tokens = np.concatenate(fresh)
        metrics["staleness_mean"] = float(tokens.mean())
        metrics["staleness_max"] = float(tokens.max())
        metrics["staleness_oldest"] = float(np.mean([one.max() for one in fresh]))
    if replayed:
        metrics["staleness_replayed"] = float(np.mean([one.max() for one in replayed]))
        metrics["replayed"] = len(replayed) / (len(fresh) + len(replayed))
    return metrics
