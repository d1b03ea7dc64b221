"""I3, I5 and I6 for groups: each task's group in each policy's training."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isclose, isnan, nan
from statistics import fmean

from headrace.schemas.events import (
    EpisodeEnded,
    GroupClosed,
    GroupSample,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.schemas.packed import pack_f32, unpack_f32
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import use_and_options
from headrace.stream_jobs.advantages import TurnAdvantage
from headrace.stream_jobs.groups import OVERLONG
from headrace.stream_jobs.load_advantage import load_advantage
from headrace.stream_jobs.selection import NOT_SELECTED
from tests.checker.facts import Facts, Violations
from tests.checker.trajectories import use_of

NEVER_COUNTS = ("reward_out_of_range", "policy_absent", "no_tokens")
"""Reasons to leave out a sample that has a reward, but not in its group's mean."""


def check(facts: Facts, recipe: Recipe, *, settled: bool) -> Violations:
    """Judges all groups. `settled`: every ended task must have one for each policy that trains."""
    training = {name: one for name, one in recipe.policies.items() if one.training is not None}
    if settled:
        for ended in facts.events(TaskEnded):
            for policy in training:
                if facts.get(GroupClosed, ended.task, policy) is None:
                    yield f"I3: task {ended.task} has ended, and has no group of {policy}"
    for group in facts.events(GroupClosed):
        name = f"group {group.policy}/{group.task}"
        task_ended = facts.get(TaskEnded, group.task)
        if group.policy not in training:
            yield f"I3: {name} is of a policy that does not train"
        elif task_ended is None:
            yield f"I1: {name} is of a task that has not ended"
        elif group.verdict == "dropped":
            if not group.reason or group.samples:
                found = f"for reason {group.reason!r}, with {len(group.samples)}"
                yield f"I3: {name} is dropped {found}"
        else:
            selects = training[group.policy].groups.select is not None
            yield from _scored(facts, group, task_ended, selects, name)
            yield from _advantages(group, training[group.policy], task_ended, name)


def _scored(
    facts: Facts, group: GroupClosed, ended: TaskEnded, selects: bool, name: str
) -> Violations:
    if ended.purpose == "evaluate" or ended.closed_by != "all":
        yield f"I3: {name} would train on a task that is {ended.purpose}, {ended.closed_by}"
    outcomes = {outcome.sample: outcome for outcome in ended.outcomes}
    samples = [sample.sample for sample in group.samples]
    excluded = [sample.sample for sample in group.excluded]
    if sorted(samples + excluded) != sorted(outcomes):
        yield f"I3: {name} has samples {samples}, leaves out {excluded}, of {sorted(outcomes)}"
    left = sum(one.reason == NOT_SELECTED for one in group.excluded)
    if len(samples) + left < ended.minimum:
        yield f"I3: {name} has {len(samples)} samples, fewer than {ended.minimum}"
    for sample in group.samples:
        yield from _sample(facts, group, sample, outcomes.get(sample.sample), name)
    for exclusion in group.excluded:
        outcome = outcomes.get(exclusion.sample)
        if not exclusion.reason:
            yield f"I3: {name} leaves sample {exclusion.sample} out without a reason"
        counts = outcome is not None and outcome.reward is not None and outcome.failure is None
        known = exclusion.reason in NEVER_COUNTS
        if exclusion.reason == OVERLONG and not (outcome is not None and outcome.masked):
            yield f"I3: {name} leaves out {exclusion.sample} as overlong, and it is not masked"
        known = known or exclusion.reason == OVERLONG
        known = known or (exclusion.reason == NOT_SELECTED and selects)
        # Beside a demonstration a filter leaves out what was sampled, not the whole group.
        filtered = any(sample.oldest_version < 0 for sample in group.samples)
        if counts and not (known or filtered):
            yield f"I3: {name} leaves out {exclusion.sample} as {exclusion.reason}, and it counts"


def _sample(
    facts: Facts, group: GroupClosed, sample: GroupSample, outcome: EpisodeEnded | None, name: str
) -> Violations:
    name = f"{name}: sample {sample.sample}"
    if outcome is None or (sample.trajectory, sample.reward) != (
        outcome.trajectory,
        outcome.reward,
    ):
        yield f"I6: {name} is not its outcome"
        return
    if outcome.masked and sample.oldest_version >= 0:
        yield f"I3: {name} is trained on, and masked"
    trajectory = facts.resolve(sample.trajectory)
    use = use_of(trajectory, group.policy) if isinstance(trajectory, TrajectoryRecorded) else None
    if use is None:
        yield f"I3: {name} is of an episode in which the policy took no part"
        return
    stated = (sample.tokens, sample.longest, sample.oldest_version)
    counted = (use.tokens, use.longest, use.oldest_version)
    if stated != counted:
        yield f"I5: {name} states tokens, length and oldest version {stated}: they are {counted}"


def _advantages(group: GroupClosed, policy: Policy, ended: TaskEnded, name: str) -> Violations:
    """They follow from all rewards that were sampled, by the recipe's estimator; others are 1.

    Masked samples count, and have none themselves. So do those that a filter left out.
    """
    sampled = [sample for sample in group.samples if sample.oldest_version >= 0]
    known = {sample.sample: sample.reward for sample in sampled}
    out = {one.sample for one in group.excluded if one.reason not in NEVER_COUNTS}
    for outcome in ended.outcomes:
        if outcome.sample in out and outcome.reward is not None and outcome.failure is None:
            known.setdefault(outcome.sample, outcome.reward)
    everything = [known[sample] for sample in sorted(known)]
    unselected = {one.sample for one in group.excluded if one.reason == NOT_SELECTED}
    if _compares_all(policy):
        unselected = set()
    order = sorted(known.keys() - unselected)
    rewards = [known[sample] for sample in order]
    estimator, _ = use_and_options(policy.groups.advantage)
    if group.estimator != estimator:
        yield f"I3: {name} is scored by {group.estimator}, the recipe says {estimator}"
    estimate = load_advantage(policy.groups.advantage)
    advantages: list[Sequence[float]] = []
    if rewards and isinstance(estimate, TurnAdvantage):
        advantages += estimate(rewards, [_turn_rewards(ended, group, one) for one in order])
    elif rewards and not isinstance(estimate, TurnAdvantage):
        advantages += [[one] for one in estimate(rewards)]
    expected = dict(zip(order, advantages, strict=True))
    if any(one.advantages != pack_f32(expected[one.sample]) for one in sampled):
        yield f"I3: {name} has other advantages than its rewards {rewards} give"
    for sample in group.samples:
        if sample.oldest_version < 0 and sample.advantages != pack_f32([1.0]):
            yield f"I3: {name}: sample {sample.sample} was demonstrated, its advantage isn't 1"
    stated = nan if group.mean is None else group.mean
    mean = fmean(everything) if everything else nan
    if not isclose(stated, mean) and not (isnan(stated) and isnan(mean)):
        yield f"I3: {name} states the mean {group.mean} of rewards {everything}"


def _compares_all(policy: Policy) -> bool:
    """Whether advantages follow from all rewards, those of unselected samples included."""
    choice = policy.groups.select
    return choice is not None and use_and_options(choice)[1].get("advantages") == "all"


def _turn_rewards(ended: TaskEnded, group: GroupClosed, sample: int) -> list[float]:
    """The rewards of a sample's turns by its outcome; 0 for a turn without one."""
    outcome = next(one for one in ended.outcomes if one.sample == sample)
    use = next(one for one in outcome.policies if one.policy == group.policy)
    rewards = [0.0 if isnan(one) else one for one in unpack_f32(use.turn_rewards)]
    assert outcome.reward is not None
    if rewards and not isclose(fsum(rewards), outcome.reward, rel_tol=1e-6, abs_tol=1e-6):
        rewards[-1] += outcome.reward - fsum(rewards)
    return rewards
