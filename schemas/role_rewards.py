"""The reward of a role, and of a policy.

A role learns from the named reward that has its name, `episode.rewards["solver"]`, or from the
episode's reward if there is no such one. If an episode has no reward, no role of it has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from math import isclose
from statistics import fmean

from headrace.schemas.events import EpisodeEnded, PolicyUse, TrajectoryRecorded

Rewarded = EpisodeEnded | TrajectoryRecorded
ROUNDING = 1e-12
"""Rewards whose difference, relative to the largest, is smaller are equal: sums of the same numbers
in another order may differ by their rounding."""
SMALLEST_DIFFERENCE = 1e-12
"""Rewards are also equal if their difference is not larger than this. Parts of about 1 that cancel
to 0, such as 1 and ten times -0.1, leave about 1e-16, which no relative bound takes for 0."""
OVERLONG = "overlong"
"""The named reward that is the penalty for length. No role has this name."""


def are_equal(reward: float, other: float) -> bool:
    """Returns whether two rewards are equal, but for rounding."""
    return isclose(reward, other, rel_tol=ROUNDING, abs_tol=SMALLEST_DIFFERENCE)


def passes(reward: float, passing: float) -> bool:
    """Returns whether a reward is at least `passing`, but for rounding."""
    return reward >= passing or are_equal(reward, passing)


def role_reward(event: Rewarded, role: str) -> float | None:
    """Returns what a role learns from. None if the episode has no reward."""
    return None if event.reward is None else event.rewards.get(role, event.reward)


def policy_reward(event: Rewarded, policy: str) -> float | None:
    """Returns the mean reward of the roles in which a policy may learn.

    It is the episode's reward if the policy had no turn, and None if the episode has no reward.
    """
    if event.reward is None or not event.rewards:
        return event.reward
    own = [event.rewards.get(role, event.reward) for role in _roles(event, policy)]
    return fmean(own) if own else event.reward


def learned_tokens(uses: Iterable[PolicyUse], untrained: Collection[str]) -> Counter[str]:
    """Returns, for each role, the number of tokens for which an episode may have a penalty.

    They are the tokens that may be trained on. `untrained` are the policies that do not learn.
    """
    tokens = Counter[str]()
    for use in uses:
        if use.policy not in untrained:
            tokens[use.role] += use.tokens
    return tokens


def own_penalty(penalty: float, tokens: Counter[str], role: str) -> float:
    """Returns what a role with a reward of its own pays of the episode's penalty for length.

    It pays for its share of the `learned_tokens`. Otherwise a role could cost another its reward.
    """
    return penalty * tokens[role] / max(1, tokens.total())


def length_penalty(event: EpisodeEnded, policy: str, untrained: Collection[str] = ()) -> float:
    """Returns what `policy_reward` has lost to `overlong_penalty`, at least 0.

    A role with a reward of its own pays the `own_penalty`, and every other role the episode's.
    `untrained` are the policies that do not learn.
    """
    penalty = -event.rewards.get(OVERLONG, 0.0)
    if penalty <= 0:
        return 0.0
    tokens = learned_tokens(event.policies, untrained)
    paid = [
        own_penalty(penalty, tokens, role) if role in event.rewards else penalty
        for role in _roles(event, policy)
    ]
    return fmean(paid) if paid else penalty


def _roles(event: Rewarded, policy: str) -> list[str]:
    """The roles of a policy, without those that only older versions play."""
    if isinstance(event, EpisodeEnded):
        played = [(use.role, use.tokens > 0) for use in event.policies if use.policy == policy]
    else:
        played = [(one.role, one.trainable) for one in event.turns if one.policy == policy]
    learning = [role for role, learns in played if learns]
    return list(dict.fromkeys(learning or [role for role, _ in played]))
