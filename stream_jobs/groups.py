"""Decides which samples of an ended task count for a policy, and their advantages. No I/O.

Every TaskEnded gives one GroupClosed for every policy of the recipe that trains: scored, or dropped
with the reason. Otherwise the task would stay open for ever. A sample that the infrastructure made
fail, or that has no reward, is excluded with the reason. It never counts as reward 0.

A masked sample (`overlong = "mask"`) counts with its reward, so that the advantages of the others
are right, but it is excluded itself.

If a whole sample was demonstrated, the policy learns it whatever the other samples are: its
advantage is 1, and estimators and filters see only the samples that the policy sampled itself.

An estimator gets one reward for each sample, and a `TurnAdvantage` also those of its turns. Their
sum is the sample's reward: what followed the last turn counts for that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isnan
from statistics import fmean
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import (
    EpisodeEnded,
    Exclusion,
    GroupClosed,
    GroupSample,
    PolicyUse,
    Ref,
    TaskEnded,
)
from headrace.schemas.packed import count, pack_f32, unpack_f32
from headrace.schemas.recipe.policy import Groups
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import use_and_options
from headrace.services.base.plugins import load_with_options
from headrace.stream_jobs.advantages import TurnAdvantage, deviation, estimated
from headrace.stream_jobs.filters import FILTERS, Filter, Group, reason_of
from headrace.stream_jobs.load_advantage import load_advantage
from headrace.stream_jobs.selection import NOT_SELECTED, Selector

REWARD_LIMIT = 1e30
"""Samples with a larger reward are excluded. Advantages are float32, and one absurd reward must not
stop the job."""
DEMONSTRATED_ADVANTAGE = 1.0
"""The advantage of a demonstrated sample."""
OVERLONG = "overlong"
"""The reason to exclude a masked sample."""
EVALUATE = "evaluate"
"""The reason to drop every group of a task whose purpose is evaluation."""
ROUNDING = 1e-6
"""The rewards of turns are float32, that of the episode is float64. A smaller difference, relative
to them, is no reward."""
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _CountedSample:
    sample: int
    trajectory: Ref
    reward: float
    use: PolicyUse
    overlong: bool
    """Whether a limit cut it, and the recipe masks it then."""

    @property
    def demonstrated(self) -> bool:
        """Whether the policy sampled no token of it."""
        return self.use.oldest_version < 0

    @property
    def masked(self) -> bool:
        """Whether it only counts, and nothing is learned from it."""
        return self.overlong and not self.demonstrated

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """The rewards that followed its turns; 0 for a turn without one. Empty if not recorded."""
        if count(self.use.turn_rewards) * FLOAT_BYTES != len(self.use.turn_rewards):
            return ()
        return tuple(0.0 if isnan(one) else one for one in unpack_f32(self.use.turn_rewards))

    @property
    def whole_turn_rewards(self) -> tuple[float, ...]:
        """These rewards, the last one changed so that their sum is the sample's reward.

        A judge, a limit or a penalty may have given the rest, after the last turn.
        """
        rewards = self.turn_rewards
        rest = self.reward - fsum(rewards)
        if not rewards or abs(rest) <= ROUNDING * fsum(map(abs, (self.reward, *rewards))):
            return rewards
        return (*rewards[:-1], rewards[-1] + rest)


class GroupAssembler:
    """Turns ended tasks into groups with the recipe's estimators and filters."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises UsageError if an estimator or a filter of the recipe can't be loaded."""
        self._scorers = []
        for name, policy in recipe.policies.items():
            if policy.training is not None:
                try:
                    self._scorers.append(_Scorer(name, policy.groups, recipe.tasks.passing))
                except UsageError as error:
                    raise UsageError(f"policies.{name}.groups: {error}") from error

    def on_task(self, ended: TaskEnded, recorded_at_ms: int) -> list[GroupClosed]:
        """Returns one group for every policy that trains, in the recipe's order.

        `recorded_at_ms` is when the log recorded `ended`, in milliseconds since the epoch. With it,
        reading the task again gives the same groups. Raises HeadraceError if a custom estimator
        returns a wrong number of values, or values that are not finite, or a custom filter returns
        what is not a reason.
        """
        return [scorer.close(ended, recorded_at_ms) for scorer in self._scorers]


class _Scorer:
    """Closes the groups of one policy."""

    def __init__(self, policy: str, settings: Groups, passing: float) -> None:
        self._policy = policy
        self._passing = passing
        self._estimator, _ = use_and_options(settings.advantage)
        self._advantage = load_advantage(settings.advantage)
        self._selector = Selector(policy, settings.select)
        self._filters: list[tuple[str, Filter]] = [
            (use_and_options(choice)[0], load_with_options("filter", choice, FILTERS))
            for choice in settings.filters
        ]

    def close(self, ended: TaskEnded, recorded_at_ms: int) -> GroupClosed:
        return GroupClosed(
            task=ended.task,
            policy=self._policy,
            item_id=ended.item_id,
            epoch=ended.epoch,
            estimator=self._estimator,
            ended=recorded_at_ms,
            seconds=max((one.seconds for one in ended.outcomes if one.attempts), default=0.0),
            **self._judge(ended),
        )

    def _judge(self, ended: TaskEnded) -> dict[str, Any]:
        """Returns the verdict, and the fields of GroupClosed that explain it."""
        if ended.purpose == "evaluate":
            return {"verdict": "dropped", "reason": EVALUATE}
        if ended.closed_by != "all":
            return {"verdict": "dropped", "reason": ended.closed_by}
        counted, excluded = self._count(ended)
        if counted:
            return self._score(ended, counted, excluded)
        absent = any(exclusion.reason == "policy_absent" for exclusion in excluded)
        reason = "policy_absent" if absent else "all_failed"
        return {"verdict": "dropped", "reason": reason, "excluded": tuple(excluded)}

    def _count(self, ended: TaskEnded) -> tuple[list[_CountedSample], list[Exclusion]]:
        counted: list[_CountedSample] = []
        excluded: list[Exclusion] = []
        first: dict[int, EpisodeEnded] = {}
        for outcome in ended.outcomes:
            first.setdefault(outcome.sample, outcome)
        for sample, outcome in sorted(first.items()):
            verdict = _count_one(outcome, self._policy)
            if isinstance(verdict, _CountedSample) and self._has_absurd_turns(verdict):
                verdict = "reward_out_of_range"
            if isinstance(verdict, str):
                excluded.append(Exclusion(sample=sample, reason=verdict))
            else:
                counted.append(verdict)
        return counted, excluded

    def _has_absurd_turns(self, sample: _CountedSample) -> bool:
        """Whether the estimator can't use the rewards of a sample's turns."""
        by_turn = isinstance(self._advantage, TurnAdvantage)
        return by_turn and any(abs(one) > REWARD_LIMIT for one in sample.turn_rewards)

    def _score(
        self, ended: TaskEnded, counted: Sequence[_CountedSample], excluded: list[Exclusion]
    ) -> dict[str, Any]:
        sampled = [sample for sample in counted if not sample.demonstrated]
        samples = [
            _group_sample(one, (DEMONSTRATED_ADVANTAGE,)) for one in counted if one.demonstrated
        ]
        masked = [sample for sample in counted if sample.masked]
        excluded += [Exclusion(sample=one.sample, reason=OVERLONG) for one in masked]
        reason = "too_few_samples" if len(counted) - len(masked) < ended.minimum else None
        if len(masked) == len(counted):
            reason = OVERLONG
        fields: dict[str, Any] = {}
        if sampled:
            kept = self._kept(ended, sampled)
            excluded += [
                Exclusion(sample=one.sample, reason=NOT_SELECTED)
                for one in sampled
                if one not in kept
            ]
            advantages = self._advantages(ended.task, sampled, kept)
            group = self._group(ended, sampled, kept, advantages)
            fields = {
                "mean": group.mean,
                "deviation": group.deviation,
                "rewarded": len(sampled),
                "passed": sum(one.reward >= self._passing for one in sampled),
                "sampled_tokens": sum(one.use.tokens for one in sampled),
                "newest_version": max(one.use.oldest_version for one in sampled),
            }
            filtered = self._filter(group)
            learned = [
                (one, advantage)
                for one, advantage in zip(kept, advantages, strict=True)
                if not one.masked
            ]
            if filtered is None:
                samples += [_group_sample(*one) for one in learned]
            elif samples:
                # The demonstrated samples are still learned.
                excluded += [Exclusion(sample=one.sample, reason=filtered) for one, _ in learned]
            else:
                reason = reason or filtered
        fields["excluded"] = tuple(sorted(excluded, key=lambda one: one.sample))
        if reason is not None:
            return {"verdict": "dropped", "reason": reason, **fields}
        samples.sort(key=lambda one: one.sample)
        return {"verdict": "scored", "samples": tuple(samples), **fields}

    def _kept(
        self, ended: TaskEnded, sampled: Sequence[_CountedSample]
    ) -> Sequence[_CountedSample]:
        """Returns the samples that the selection keeps, and the masked ones."""
        free = [sample for sample in sampled if not sample.masked]
        rewards, tokens = [one.reward for one in free], [one.use.tokens for one in free]
        kept = {free[index].sample for index in self._selector.keep(ended, rewards, tokens)}
        return [sample for sample in sampled if sample.masked or sample.sample in kept]

    def _filter(self, group: Group) -> str | None:
        for name, drop in self._filters:
            reason = reason_of(name, drop, group)
            if reason is not None:
                return reason
        return None

    def _group(
        self,
        ended: TaskEnded,
        sampled: Sequence[_CountedSample],
        kept: Sequence[_CountedSample],
        advantages: Sequence[Sequence[float]],
    ) -> Group:
        rewards = [sample.reward for sample in sampled]
        return Group(
            task=ended.task,
            policy=self._policy,
            item_id=ended.item_id,
            epoch=ended.epoch,
            rewards=tuple(sample.reward for sample in kept),
            advantages=tuple(
                0.0 if sample.masked else max(one, key=abs)
                for sample, one in zip(kept, advantages, strict=True)
            ),
            tokens=tuple(sample.use.tokens for sample in kept),
            mean=fmean(rewards),
            deviation=deviation(rewards),
        )

    def _advantages(
        self, task: int, sampled: Sequence[_CountedSample], kept: Sequence[_CountedSample]
    ) -> list[tuple[float, ...]]:
        """Returns each kept sample's advantages: one for all its turns, or one for each."""
        compared = sampled if self._selector.compares_all else kept
        rewards = [sample.reward for sample in compared]
        turns = [sample.whole_turn_rewards for sample in compared]
        found = estimated(self._estimator, self._advantage, task, rewards, turns)
        return [one for sample, one in zip(compared, found, strict=True) if sample in kept]


def _count_one(outcome: EpisodeEnded, policy: str) -> _CountedSample | str:
    """Returns the sample as it counts for the policy, or the reason to exclude it."""
    failure = outcome.failure
    if failure is not None and failure.origin == "infrastructure":
        return failure.code
    if outcome.ending in ("failed", "cancelled"):
        return failure.code if failure is not None else outcome.ending
    if outcome.reward is None or outcome.trajectory is None:
        return "no_reward" if outcome.reward is None else "no_trajectory"
    if not abs(outcome.reward) <= REWARD_LIMIT:  # This rejects NaN, too.
        return "reward_out_of_range"
    uses = [use for use in outcome.policies if use.policy == policy]
    if not uses:
        return "policy_absent"
    use = _merge(uses)
    if use.tokens <= 0:
        return "no_tokens"
    return _CountedSample(outcome.sample, outcome.trajectory, outcome.reward, use, outcome.masked)


def _group_sample(counted: _CountedSample, advantages: Sequence[float]) -> GroupSample:
    return GroupSample(
        sample=counted.sample,
        trajectory=counted.trajectory,
        reward=counted.reward,
        advantages=pack_f32(advantages),
        tokens=counted.use.tokens,
        longest=counted.use.longest,
        oldest_version=counted.use.oldest_version,
    )


def _merge(uses: Sequence[PolicyUse]) -> PolicyUse:
    """Joins what a policy did in its roles of an episode. Roles without tokens do not count."""
    if len(uses) == 1:
        return uses[0]
    used = [use for use in uses if use.tokens > 0] or list(uses)
    return used[0].model_copy(
        update={
            "tokens": sum(use.tokens for use in used),
            "longest": max(use.longest for use in used),
            # The order of turns across roles is not known.
            "turn_rewards": b"",
            "oldest_version": min(
                (use.oldest_version for use in used if use.oldest_version >= 0), default=-1
            ),
        }
    )
