"""A sample as it counts for one policy, and the rewards that the policy learns from. No I/O.

A policy may play several roles of an episode. Its turns in a role that has a reward of its own
learn from that one, and all its other turns learn together from the episode's. So each sample has
one or more `RewardedTurns`. If a role has a reward of its own in one sample of a task, it is apart
in all of them, so that it is compared with itself. Roles of pinned versions have no tokens to train
on, and do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import fsum, isnan

from headrace.schemas.events import EpisodeEnded, PolicyUse, Ref, TaskEnded
from headrace.schemas.packed import count, unpack_f32, unpack_i32
from headrace.schemas.role_rewards import length_penalty, policy_reward, role_reward

REWARD_LIMIT = 1e30
"""Samples with a larger reward are excluded. Advantages are float32, and one absurd reward must not
stop the job."""
ROUNDING = 1e-6
"""The rewards of turns are float32, that of the episode is float64. A smaller difference, relative
to them, is no reward."""
ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class RewardedTurns:
    """The turns of a policy in an episode that learn from one reward."""

    role: str
    """The role, if it has a reward of its own. Empty for all others."""
    reward: float
    demonstrated: bool
    """Whether the policy sampled none of their tokens."""
    turns: tuple[int, ...]
    """Their indices among the policy's turns. All of them if it is empty."""
    turn_rewards: tuple[float, ...]
    """The rewards that followed each of them until the next one, 0 if there were none. Empty if not
    recorded."""

    @property
    def whole_turn_rewards(self) -> tuple[float, ...]:
        """These rewards, the last one changed so that their sum is the reward.

        A judge, a limit or a penalty may have given the rest, after the last turn.
        """
        rewards = self.turn_rewards
        rest = self.reward - fsum(rewards)
        if not rewards or abs(rest) <= ROUNDING * fsum(map(abs, (self.reward, *rewards))):
            return rewards
        return (*rewards[:-1], rewards[-1] + rest)


@dataclass(frozen=True, slots=True)
class CountedSample:
    """A sample that counts for a policy."""

    sample: int
    trajectory: Ref
    reward: float
    """The mean of the policy's roles."""
    penalty: float
    """What the reward has lost because the episode is long, at least 0."""
    overlong: bool
    """Whether a limit cut it, and the recipe masks it then."""
    parts: tuple[RewardedTurns, ...]
    """At least one."""
    turns: int
    """The number of the policy's turns. 0 if it is not known: then there is one part."""
    tokens: int
    longest: int
    oldest_version: int

    @property
    def unpenalised(self) -> float:
        """The reward without the penalty for its length."""
        return self.reward + self.penalty

    @property
    def demonstrated(self) -> bool:
        """Whether the policy sampled no token of it."""
        return self.oldest_version < 0

    @property
    def masked(self) -> bool:
        """Whether it only counts, and nothing is learned from it."""
        return self.overlong and not self.demonstrated

    def by_turn(self, advantages: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """Returns the advantages of the policy's turns from those of the parts.

        A part's are one for all its turns, or one for each. So is the result. A turn that is in no
        part gets 0: it is not trained on.
        """
        if len(self.parts) == 1 and (len(advantages[0]) < 2 or not self.parts[0].turns):
            return tuple(advantages[0])
        found = [0.0] * self.turns
        for part, values in zip(self.parts, advantages, strict=True):
            spread = values if len(values) > 1 else list(values) * len(part.turns)
            for turn, value in zip(part.turns, spread, strict=True):
                found[turn] = value
        return tuple(found)


def named_rewards(ended: TaskEnded) -> frozenset[str]:
    """Returns the names of all rewards of a task's samples, among them those of roles."""
    return frozenset(name for outcome in ended.outcomes for name in outcome.rewards)


def count_sample(
    outcome: EpisodeEnded,
    policy: str,
    named: Collection[str],
    *,
    penalised: bool = False,
    untrained: Collection[str] = (),
) -> CountedSample | str:
    """Returns the sample as it counts for the policy, or the reason to exclude it.

    `named` are the `named_rewards` of its task. `penalised`: the recipe penalises length.
    `untrained` are the recipe's policies that do not learn.
    """
    failure = outcome.failure
    if failure is not None and failure.origin == "infrastructure":
        return failure.code
    if outcome.ending in ("failed", "cancelled"):
        return failure.code if failure is not None else outcome.ending
    if outcome.reward is None or outcome.trajectory is None:
        return "no_reward" if outcome.reward is None else "no_trajectory"
    uses = [use for use in outcome.policies if use.policy == policy]
    if not uses:
        return "policy_absent"
    learning = [use for use in uses if use.tokens > 0]
    if not learning:
        return "no_tokens"
    parts = _parts(outcome, uses, learning, named)
    if parts is None:
        return "turns_unknown"
    if not all(abs(part.reward) <= REWARD_LIMIT for part in parts):  # This rejects NaN, too.
        return "reward_out_of_range"
    reward = policy_reward(outcome, policy)
    assert reward is not None
    return CountedSample(
        sample=outcome.sample,
        trajectory=outcome.trajectory,
        reward=reward,
        penalty=length_penalty(outcome, policy, untrained) if penalised else 0.0,
        overlong=outcome.masked,
        parts=parts,
        turns=sum(len(use.turns) // ITEM_BYTES for use in uses),
        tokens=sum(use.tokens for use in learning),
        longest=max(use.longest for use in learning),
        oldest_version=min(
            (use.oldest_version for use in learning if use.oldest_version >= 0), default=-1
        ),
    )


def _parts(
    outcome: EpisodeEnded,
    uses: Sequence[PolicyUse],
    learning: Sequence[PolicyUse],
    named: Collection[str],
) -> tuple[RewardedTurns, ...] | None:
    """Divides the turns by their rewards. None if the record does not say which turns are whose."""
    by_reward: dict[str, list[PolicyUse]] = {}
    for use in learning:
        by_reward.setdefault(use.role if use.role in named else "", []).append(use)
    indices = sorted(turn for use in uses for turn in _ints(use.turns))
    known = len(set(indices)) == len(indices) and all(_ints(use.turns) for use in uses)
    if len(by_reward) > 1 and not known:
        return None
    rank = {turn: number for number, turn in enumerate(indices)} if known else {}
    return tuple(_part(outcome, role, found, rank) for role, found in by_reward.items())


def _part(
    outcome: EpisodeEnded, role: str, uses: Sequence[PolicyUse], rank: dict[int, int]
) -> RewardedTurns:
    reward = role_reward(outcome, role) if role else outcome.reward
    assert reward is not None
    demonstrated = all(use.oldest_version < 0 for use in uses)
    if not rank:
        # With several uses, the order of their turns is not known.
        rewards = _turn_rewards(uses[0]) if len(uses) == 1 else ()
        return RewardedTurns(role, reward, demonstrated, (), rewards)
    own = sorted(turn for use in uses for turn in _ints(use.turns))
    # A role's own reward is not that of the steps: only what followed its own turns counts.
    earning = uses if role and role in outcome.rewards else outcome.policies
    complete = all(len(_turn_rewards(use)) == len(_ints(use.turns)) for use in uses)
    rewards = _until_next(own, earning) if complete else ()
    return RewardedTurns(role, reward, demonstrated, tuple(rank[turn] for turn in own), rewards)


def _until_next(own: Sequence[int], uses: Sequence[PolicyUse]) -> tuple[float, ...]:
    """The rewards of all turns of `uses`, each added to the newest of the policy's turns by then.

    A reward before the first of them counts for this one: no other turn's return has it then.
    """
    rewards = [0.0] * len(own)
    for turn, reward in sorted(
        one for use in uses for one in zip(_ints(use.turns), _turn_rewards(use), strict=False)
    ):
        rewards[max(0, bisect_right(own, turn) - 1)] += reward
    return tuple(rewards)


def _turn_rewards(use: PolicyUse) -> tuple[float, ...]:
    if count(use.turn_rewards) * ITEM_BYTES != len(use.turn_rewards):
        return ()
    return tuple(0.0 if isnan(one) else one for one in unpack_f32(use.turn_rewards))


def _ints(packed: bytes) -> list[int]:
    return unpack_i32(packed) if len(packed) % ITEM_BYTES == 0 else []
