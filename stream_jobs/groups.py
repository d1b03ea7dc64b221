"""Which samples of an ended task count for each policy, and their advantages. No I/O, no clock.

Every TaskEnded yields one GroupClosed for every policy of the recipe that trains, scored or
dropped with the reason: otherwise a task would stay undecided for ever. A sample that failed by
the infrastructure's doing, or that has no reward, is excluded with the reason and never
counted as 0.

A sample that was demonstrated throughout is learned whatever the others are: its advantage is 1,
and estimators and filters see only those that the policy sampled itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from headrace.errors import HeadraceError
from headrace.schemas.events import (
    EpisodeEnded,
    Exclusion,
    GroupClosed,
    GroupSample,
    PolicyUse,
    Ref,
    TaskEnded,
)
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.policy import Groups
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.base.plugins import load
from headrace.stream_jobs.advantages import ADVANTAGES, Advantage, deviation
from headrace.stream_jobs.filters import FILTERS, Filter, Group

REWARD_LIMIT = 1e30
"""Larger rewards are excluded: advantages are float32, and one absurd reward must stop nothing."""
DEMONSTRATED_ADVANTAGE = 1.0
"""Of what was demonstrated: it is learned as it is."""
EVALUATE = "evaluate"
"""The reason to drop every group of a task to evaluate, whatever became of it."""
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class _Counted:
    """A sample that counts."""

    outcome: EpisodeEnded
    trajectory: Ref
    reward: float
    use: PolicyUse

    @property
    def demonstrated(self) -> bool:
        """Whether the policy sampled none of it."""
        return self.use.oldest_version < 0


class GroupAssembler:
    """Turns ended tasks into groups, by the recipe's estimators and filters."""

    def __init__(self, recipe: Recipe) -> None:
        """UsageError where an estimator or a filter of the recipe can't be loaded."""
        self._scorers = [
            _Scorer(name, policy.groups)
            for name, policy in recipe.policies.items()
            if policy.training is not None
        ]

    def on_task(self, ended: TaskEnded, recorded_at_ms: int) -> list[GroupClosed]:
        """One group for every policy that trains, in the recipe's order.

        `recorded_at_ms` is when the log recorded `ended`, so that reading it again gives the same
        groups. HeadraceError where an estimator of the user's own breaks its contract.
        """
        return [scorer.close(ended, recorded_at_ms) for scorer in self._scorers]


class _Scorer:
    """Closes the groups of one policy."""

    def __init__(self, policy: str, settings: Groups) -> None:
        self._policy = policy
        self._estimator = settings.advantage
        self._advantage: Advantage = load("advantage", settings.advantage, ADVANTAGES)
        self._filters: list[Filter] = [load("filter", use, FILTERS) for use in settings.filters]

    def close(self, ended: TaskEnded, recorded_at_ms: int) -> GroupClosed:
        closed = GroupClosed(
            task=ended.task,
            policy=self._policy,
            item_id=ended.item_id,
            epoch=ended.epoch,
            verdict="dropped",
            estimator=self._estimator,
            ended=recorded_at_ms,
        )
        unusable = _unusable(ended)
        if unusable:
            return closed.model_copy(update={"reason": unusable})
        counted, excluded = self._count(ended)
        closed = closed.model_copy(update={"excluded": tuple(excluded)})
        if not counted:
            absent = any(exclusion.reason == "policy_absent" for exclusion in excluded)
            reason = "policy_absent" if absent else "all_failed"
            return closed.model_copy(update={"reason": reason})
        return self._score(closed, counted, ended.minimum)

    def _count(self, ended: TaskEnded) -> tuple[list[_Counted], list[Exclusion]]:
        counted: list[_Counted] = []
        excluded: list[Exclusion] = []
        first: dict[int, EpisodeEnded] = {}
        for outcome in ended.outcomes:
            first.setdefault(outcome.sample, outcome)
        for sample, outcome in sorted(first.items()):
            verdict = _count_one(outcome, self._policy)
            if isinstance(verdict, str):
                excluded.append(Exclusion(sample=sample, reason=verdict))
            else:
                counted.append(verdict)
        return counted, excluded

    def _score(self, closed: GroupClosed, counted: Sequence[_Counted], minimum: int) -> GroupClosed:
        sampled = [sample for sample in counted if not sample.demonstrated]
        samples = [
            _group_sample(one, DEMONSTRATED_ADVANTAGE) for one in counted if one.demonstrated
        ]
        reason = "too_few_samples" if len(counted) < minimum else None
        if sampled:
            group = self._group(closed, sampled)
            closed = closed.model_copy(update={"mean": group.mean, "deviation": group.deviation})
            filtered = self._filtered(group)
            if filtered is None:
                samples += map(_group_sample, sampled, group.advantages)
            elif samples:
                closed = _leave_out(closed, sampled, filtered)
            else:
                reason = reason or filtered
        if reason is not None:
            return closed.model_copy(update={"reason": reason})
        samples.sort(key=lambda one: one.sample)
        return closed.model_copy(update={"verdict": "scored", "samples": tuple(samples)})

    def _group(self, closed: GroupClosed, sampled: Sequence[_Counted]) -> Group:
        rewards = tuple(sample.reward for sample in sampled)
        return Group(
            task=closed.task,
            policy=closed.policy,
            item_id=closed.item_id,
            epoch=closed.epoch,
            rewards=rewards,
            advantages=self._advantages(closed.task, rewards),
            tokens=tuple(sample.use.tokens for sample in sampled),
            mean=fmean(rewards),
            deviation=deviation(rewards),
        )

    def _filtered(self, group: Group) -> str | None:
        return next((reason for drop in self._filters if (reason := drop(group))), None)

    def _advantages(self, task: int, rewards: Sequence[float]) -> tuple[float, ...]:
        advantages = tuple(float(value) for value in self._advantage(rewards))
        if len(advantages) != len(rewards):
            raise HeadraceError(
                f"advantage {self._estimator!r} gave {len(advantages)} values for the "
                f"{len(rewards)} rewards of task {task}: it must give one for each"
            )
        if not all(abs(value) <= FLOAT32_MAX for value in advantages):  # false for NaN too
            raise HeadraceError(
                f"advantage {self._estimator!r} gave {advantages} for rewards {tuple(rewards)} of "
                f"task {task}: each must be a finite float32"
            )
        return advantages


def _unusable(ended: TaskEnded) -> str:
    """Why a task is not trained on whatever its samples did; empty where it may be."""
    if ended.purpose == "evaluate":
        return EVALUATE
    return "" if ended.closed_by == "all" else ended.closed_by


def _count_one(outcome: EpisodeEnded, policy: str) -> _Counted | str:
    """The sample as it counts for the policy, or the reason to exclude it."""
    failure = outcome.failure
    if failure is not None and failure.origin == "infrastructure":
        return failure.code
    if outcome.ending in ("failed", "cancelled"):
        return failure.code if failure is not None else outcome.ending
    if outcome.reward is None or outcome.trajectory is None:
        return "no_reward" if outcome.reward is None else "no_trajectory"
    if not abs(outcome.reward) <= REWARD_LIMIT:  # true for NaN too
        return "reward_out_of_range"
    uses = [use for use in outcome.policies if use.policy == policy]
    if not uses:
        return "policy_absent"
    use = _merge(uses)
    if use.tokens <= 0:
        return "no_tokens"
    return _Counted(outcome, outcome.trajectory, outcome.reward, use)


def _leave_out(closed: GroupClosed, sampled: Sequence[_Counted], reason: str) -> GroupClosed:
    """Without what the policy sampled: what was demonstrated beside it is learned all the same."""
    left_out = [Exclusion(sample=one.outcome.sample, reason=reason) for one in sampled]
    excluded = sorted((*closed.excluded, *left_out), key=lambda one: one.sample)
    return closed.model_copy(update={"excluded": tuple(excluded)})


def _group_sample(sample: _Counted, advantage: float) -> GroupSample:
    return GroupSample(
        sample=sample.outcome.sample,
        trajectory=sample.trajectory,
        reward=sample.reward,
        advantages=pack_f32([advantage]),
        tokens=sample.use.tokens,
        longest=sample.use.longest,
        oldest_version=sample.use.oldest_version,
    )


def _merge(uses: Sequence[PolicyUse]) -> PolicyUse:
    """What a policy did in all its roles of an episode; a role without tokens has no version."""
    if len(uses) == 1:
        return uses[0]
    spoke = [use for use in uses if use.tokens > 0] or list(uses)
    return spoke[0].model_copy(
        update={
            "tokens": sum(use.tokens for use in spoke),
            "longest": max(use.longest for use in spoke),
            "oldest_version": min(
                (use.oldest_version for use in spoke if use.oldest_version >= 0), default=-1
            ),
        }
    )
