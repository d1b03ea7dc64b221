"""Decides which samples of an ended task count for a policy, and their advantages. No I/O.

Every TaskEnded gives one GroupClosed for every policy of the recipe that trains: scored, or dropped
with the reason. Otherwise the task would stay open for ever. A sample that the infrastructure made
fail, or that has no reward, is excluded with the reason. It never counts as reward 0.

A masked sample (`overlong = "mask"`) counts with its reward, so that the advantages of the others
are right, but it is excluded itself.

If a whole sample was demonstrated, the policy learns it whatever the other samples are: its
advantage is 1, and estimators and filters see only the samples that the policy sampled itself.

An estimator gets one reward for each sample, and a `TurnAdvantage` also those of its turns. Their
sum is the sample's reward: what followed the last turn counts for that turn. If roles have rewards
of their own and the policy plays several of them, each of its turns learns from the reward of its
role (`counted_samples.py`): the estimator compares each role with the same role of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import (
    EpisodeEnded,
    Exclusion,
    GroupClosed,
    GroupSample,
    TaskEnded,
)
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.policy import Groups
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import use_and_options
from headrace.schemas.role_rewards import passes
from headrace.services.base.plugins import load_with_options
from headrace.stream_jobs.advantages import TurnAdvantage, deviation, estimated
from headrace.stream_jobs.counted_samples import (
    REWARD_LIMIT,
    CountedSample,
    RewardedTurns,
    count_sample,
    named_rewards,
)
from headrace.stream_jobs.filters import FILTERS, Filter, Group, reason_of
from headrace.stream_jobs.load_advantage import load_advantage
from headrace.stream_jobs.selection import NOT_SELECTED, Selector
from headrace.stream_jobs.turn_advantages.turn_rewards import TurnRewards

DEMONSTRATED_ADVANTAGE = 1.0
"""The advantage of a demonstrated sample."""
OVERLONG = "overlong"
"""The reason to exclude a masked sample."""
EVALUATE = "evaluate"
"""The reason to drop every group of a task whose purpose is evaluation."""
SEVERAL_REWARDS = "several_rewards"
"""The reason to exclude a sample from a policy with a critic, because the policy played roles of
different rewards. The critic would credit each role with the rewards of the others."""


class GroupAssembler:
    """Turns ended tasks into groups with the recipe's estimators and filters."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises UsageError if an estimator or a filter of the recipe can't be loaded."""
        self._scorers = []
        for name, policy in recipe.policies.items():
            if policy.training is not None:
                try:
                    self._scorers.append(_Scorer(name, policy.groups, recipe))
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

    def __init__(self, policy: str, settings: Groups, recipe: Recipe) -> None:
        self._policy = policy
        self._passing = recipe.tasks.passing
        self._penalised = any(agent.overlong_buffer for agent in recipe.agents.values())
        self._untrained = {name for name, one in recipe.policies.items() if one.training is None}
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
        reasons = {exclusion.reason for exclusion in excluded}
        known = [one for one in ("policy_absent", "no_tokens", SEVERAL_REWARDS) if one in reasons]
        reason = known[0] if known else "all_failed"
        return {"verdict": "dropped", "reason": reason, "excluded": tuple(excluded)}

    def _count(self, ended: TaskEnded) -> tuple[list[CountedSample], list[Exclusion]]:
        counted: list[CountedSample] = []
        excluded: list[Exclusion] = []
        first: dict[int, EpisodeEnded] = {}
        named = named_rewards(ended)
        for outcome in ended.outcomes:
            first.setdefault(outcome.sample, outcome)
        for sample, outcome in sorted(first.items()):
            verdict = count_sample(
                outcome,
                self._policy,
                named,
                penalised=self._penalised,
                untrained=self._untrained,
            )
            if isinstance(verdict, CountedSample):
                verdict = self._unusable(verdict) or verdict
            if isinstance(verdict, str):
                excluded.append(Exclusion(sample=sample, reason=verdict))
            else:
                counted.append(verdict)
        return counted, excluded

    def _unusable(self, sample: CountedSample) -> str | None:
        """Returns why the estimator can't use a sample, or None."""
        if not isinstance(self._advantage, TurnAdvantage):
            return None
        rewards = [one for part in sample.parts for one in part.turn_rewards]
        if not all(abs(one) <= REWARD_LIMIT for one in rewards):  # This rejects NaN, too.
            return "reward_out_of_range"
        if isinstance(self._advantage, TurnRewards) and len(sample.parts) > 1:
            return SEVERAL_REWARDS
        return None

    def _score(
        self, ended: TaskEnded, counted: Sequence[CountedSample], excluded: list[Exclusion]
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
            left_out = {one.sample for one in sampled} - {one.sample for one in kept}
            excluded += [Exclusion(sample=one, reason=NOT_SELECTED) for one in sorted(left_out)]
            advantages = self._advantages(ended.task, sampled, kept)
            group = self._group(ended, sampled, kept, advantages)
            fields = {
                "mean": fmean(one.reward for one in sampled),
                "deviation": group.deviation,
                "rewarded": len(sampled),
                "passed": sum(passes(one.unpenalised, self._passing) for one in sampled),
                "sampled_tokens": sum(one.tokens for one in sampled),
                "newest_version": max(one.oldest_version for one in sampled),
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

    def _kept(self, ended: TaskEnded, sampled: Sequence[CountedSample]) -> Sequence[CountedSample]:
        """Returns the samples that the selection keeps, and the masked ones."""
        free = [sample for sample in sampled if not sample.masked]
        rewards, tokens = [one.reward for one in free], [one.tokens for one in free]
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
        sampled: Sequence[CountedSample],
        kept: Sequence[CountedSample],
        advantages: Sequence[Sequence[float]],
    ) -> Group:
        unpenalised = [sample.unpenalised for sample in sampled]
        return Group(
            task=ended.task,
            policy=self._policy,
            item_id=ended.item_id,
            epoch=ended.epoch,
            rewards=tuple(sample.unpenalised for sample in kept),
            advantages=tuple(
                0.0 if sample.masked else max(one, key=abs)
                for sample, one in zip(kept, advantages, strict=True)
            ),
            tokens=tuple(sample.tokens for sample in kept),
            mean=fmean(unpenalised),
            deviation=deviation(unpenalised),
            penalised=self._compares_episodes(sampled) and any(one.penalty for one in sampled),
        )

    def _compares_episodes(self, sampled: Sequence[CountedSample]) -> bool:
        """Whether the advantages follow from one reward of each episode, not of roles or turns."""
        turns = isinstance(self._advantage, TurnAdvantage)
        return not turns and all(len(sample.parts) == 1 for sample in sampled)

    def _advantages(
        self, task: int, sampled: Sequence[CountedSample], kept: Sequence[CountedSample]
    ) -> list[tuple[float, ...]]:
        """Returns each kept sample's advantages: one for all its turns, or one for each.

        The same role of several samples is compared.
        """
        by_role: dict[str, dict[int, RewardedTurns]] = {}
        for sample in sampled if self._selector.compares_all else kept:
            for part in sample.parts:
                if not part.demonstrated:
                    by_role.setdefault(part.role, {})[sample.sample] = part
        found: dict[tuple[str, int], tuple[float, ...]] = {}
        for role, parts in by_role.items():
            rewards = [part.reward for part in parts.values()]
            turns = [part.whole_turn_rewards for part in parts.values()]
            advantages = estimated(self._estimator, self._advantage, task, rewards, turns)
            found |= {(role, sample): one for sample, one in zip(parts, advantages, strict=True)}
        return [
            # What is demonstrated is learned whatever its advantage is.
            sample.by_turn([found.get((part.role, sample.sample), (0.0,)) for part in sample.parts])
            for sample in kept
        ]


def _group_sample(counted: CountedSample, advantages: Sequence[float]) -> GroupSample:
    return GroupSample(
        sample=counted.sample,
        trajectory=counted.trajectory,
        reward=counted.reward,
        advantages=pack_f32(advantages),
        tokens=counted.tokens,
        longest=counted.longest,
        oldest_version=counted.oldest_version,
    )
