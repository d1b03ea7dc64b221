"""Advantages and returns of the sampled tokens by generalized advantage estimation. No torch.

The steps of a sample are its sampled tokens, sorted by turn. Tokens that were read or demonstrated
are no steps. The value of a step is that of the tokens before it. It does not matter in which
sequence a token is: branches of an episode follow one another as its turns do.

After the last step the value is 0, also if a limit cut the episode. The recipe says what a cut
episode is worth (`unfinished_reward`), so the limits are part of the task.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.events import TrajectoryRecorded
from headrace.schemas.recipe.learning.critic_settings import CriticSettings
from headrace.trainer.sequences import Ints, TokenSequence, UnusableBatch

Doubles = NDArray[np.float64]

EPSILON = 1e-8
"""Added to the deviation of the advantages, so that nothing is divided by 0."""
LARGEST = 1e15
"""The largest absolute reward. The critic's loss is float32, and squares it."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """What the critic says of the S sampled tokens of an update. All are [S] float64."""

    tokens: Ints
    """[S] int64: their indices among the trained tokens of the update."""
    values: Doubles
    """The values at the batch's start."""
    returns: Doubles
    """What the values should have been."""
    advantages: Doubles


def with_rewards(
    sequences: Sequence[TokenSequence],
    trajectory: TrajectoryRecorded,
    policy: str,
    rewards: Sequence[float],
) -> list[TokenSequence]:
    """Returns all sequences of a sample with the rewards of their tokens.

    `rewards` has one for each turn of the policy, or only the episode's. A turn's reward belongs to
    its last sampled token, or if it has none, to the last one before it. A reward before all
    sampled tokens belongs to none. Raises UnusableBatch for another number of rewards, or a reward
    that is too large.
    """
    own = [index for index, turn in enumerate(trajectory.turns) if turn.policy == policy]
    if len(rewards) not in (1, len(own)):
        raise UnusableBatch(f"{len(rewards)} rewards for {len(own)} turns of policy {policy!r}")
    if max(map(abs, rewards), default=0.0) > LARGEST:
        raise UnusableBatch(f"a reward of {max(rewards, key=abs):g} is too large for a critic")
    by_sequence = [np.zeros(len(one.positions), dtype=np.float32) for one in sequences]
    last: dict[int, tuple[int, int]] = {}
    for number, one in enumerate(sequences):
        ends = np.cumsum([count for _, count in one.samplings]) - 1
        for turn, end in zip(one.turns, ends.tolist(), strict=True):
            if not one.demonstrated[end]:
                last[turn] = number, end
    sampled = sorted(last)
    for turn, reward in zip(own[-len(rewards) :], rewards, strict=True):
        if before := bisect_right(sampled, turn):
            number, token = last[sampled[before - 1]]
            by_sequence[number][token] += reward
    return [replace(one, rewards=of) for one, of in zip(sequences, by_sequence, strict=True)]


def estimate(
    settings: CriticSettings, sequences: Sequence[TokenSequence], values: Doubles
) -> Estimates:
    """Returns the estimates of an update, from the values [T] of its trained tokens.

    An update has all sequences of its samples.
    """
    samples = np.repeat([one.sample for one in sequences], [len(o.positions) for o in sequences])
    turns = np.concatenate(
        [np.repeat(one.turns, [count for _, count in one.samplings]) for one in sequences]
    )
    sampled = np.flatnonzero(np.concatenate([~one.demonstrated for one in sequences]))
    steps = sampled[np.lexsort((sampled, turns[sampled], samples[sampled]))]
    _, lengths = np.unique(samples[steps], return_counts=True)
    rewards = np.concatenate([one.rewards for one in sequences]).astype(np.float64)
    known = rewards[steps], values[steps], lengths, settings.discount
    advantages = gae(*known, settings.gae_lambda)
    returns = gae(*known, settings.value_lambda) + values[steps]
    return Estimates(steps, values[steps], returns, advantages)


def gae(
    rewards: Doubles, values: Doubles, lengths: Ints, discount: float, gae_lambda: float
) -> Doubles:
    """Returns the advantages [S] of the steps of several samples, one sample after the other.

    With r the rewards and V the values, both [S], which are 0 after the last step of a sample:

        delta[t] = r[t] + discount * V[t + 1] - V[t]
        A[t] = delta[t] + discount * gae_lambda * A[t + 1]

    Generalized advantage estimation (arXiv 1506.02438), equations 11 to 16. `lengths` are the
    numbers of steps of the samples, each at least 1.
    """
    ends = np.cumsum(lengths)
    following = np.append(values[1:], 0.0)
    following[ends - 1] = 0.0
    columns = np.repeat(np.arange(len(lengths)), lengths)
    rows = np.arange(len(values)) - (ends - lengths)[columns]
    found = np.zeros((int(lengths.max()), len(lengths)))
    found[rows, columns] = rewards + discount * following - values
    for row in range(len(found) - 2, -1, -1):
        found[row] += discount * gae_lambda * found[row + 1]
    return found[rows, columns]


def normalized(estimates: Sequence[Estimates]) -> list[Estimates]:
    """Returns the estimates of a batch's updates with advantages of mean 0 and deviation 1.

    The mean and the population's deviation are over all of them. Advantages that are all equal
    become 0. Equations 7 and 10 of PPO (arXiv 1707.06347) do not have this step; its authors' code
    has it.
    """
    together = np.concatenate([one.advantages for one in estimates])
    mean, scale = together.mean(), together.std() + EPSILON
    return [replace(one, advantages=(one.advantages - mean) / scale) for one in estimates]


def value_metrics(estimates: Sequence[Estimates]) -> dict[str, float]:
    """Returns the means of values and returns, and which share of their variance is explained.

    `explained_variance` is 1 - Var(returns - values) / Var(returns): 1 if the critic knew all
    returns, 0 if a constant were as good. It is absent if all returns are equal.
    """
    values = np.concatenate([one.values for one in estimates])
    returns = np.concatenate([one.returns for one in estimates])
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    if variance := float(returns.var()):
        metrics["explained_variance"] = 1 - float((returns - values).var()) / variance
    return metrics
