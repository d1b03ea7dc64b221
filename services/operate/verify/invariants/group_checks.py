"""I3, I5 and I6 for groups: each task's group in each policy's training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import fsum, isclose, isnan, nan
from statistics import fmean

from headrace.schemas.events import (
    EpisodeEnded,
    GroupClosed,
    GroupSample,
    PolicyUse,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.schemas.packed import pack_f32, unpack_f32, unpack_i32
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import use_and_options
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.operate.verify.invariants.trajectory_checks import use_of
from headrace.stream_jobs.advantages import TurnAdvantage
from headrace.stream_jobs.groups import OVERLONG
from headrace.stream_jobs.load_advantage import load_advantage
from headrace.stream_jobs.selection import NOT_SELECTED

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
            rewards = {outcome.sample: outcome.reward for outcome in task_ended.outcomes}
            if all(rewards.get(sample.sample) is not None for sample in group.samples):
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
    if outcome is None or sample.trajectory != outcome.trajectory:
        yield f"I6: {name} is not its outcome"
        return
    if outcome.reward is None:
        yield f"I6: {name} counts as {sample.reward}, and its episode has no reward"
        return
    if sample.reward != (reward := _reward(outcome, group.policy)):
        yield f"I6: {name} is not its outcome: reward {sample.reward}, its policy's is {reward}"
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
    outcomes = {outcome.sample: outcome for outcome in ended.outcomes}
    counting = {sample.sample for sample in sampled}
    out = {one.sample for one in group.excluded if one.reason not in NEVER_COUNTS}
    for outcome in ended.outcomes:
        if outcome.sample in out and outcome.reward is not None and outcome.failure is None:
            counting.add(outcome.sample)
    everything = [_reward(outcomes[sample], group.policy) for sample in sorted(counting)]
    unselected = {one.sample for one in group.excluded if one.reason == NOT_SELECTED}
    if _compares_all(policy):
        unselected = set()
    order = sorted(counting - unselected)
    rewards = [_reward(outcomes[sample], group.policy) for sample in order]
    estimator, _ = use_and_options(policy.groups.advantage)
    if group.estimator != estimator:
        yield f"I3: {name} is scored by {group.estimator}, the recipe says {estimator}"
    expected = _expected(policy, [outcomes[sample] for sample in order], ended, group.policy)
    if any(one.advantages not in expected[one.sample] for one in sampled):
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


def _reward(outcome: EpisodeEnded, policy: str) -> float:
    """The mean of what the roles of the policy learn from."""
    assert outcome.reward is not None
    used = [use.role for use in outcome.policies if use.policy == policy and use.tokens]
    return fmean(outcome.rewards.get(role, outcome.reward) for role in used)


def _expected(
    policy: Policy, outcomes: Sequence[EpisodeEnded], ended: TaskEnded, name: str
) -> dict[int, set[bytes]]:
    """The advantages of each sample, packed: one for each turn, and the only one if all turns learn
    from one reward.

    Turns of roles with rewards of their own are compared with the same role in other samples.
    """
    estimate = load_advantage(policy.groups.advantage)
    named = {name for outcome in ended.outcomes for name in outcome.rewards}
    played: dict[str, dict[int, dict[int, float]]] = {}
    """Role, sample, and each turn with what followed it."""
    lengths: dict[int, int] = {}
    for outcome in outcomes:
        lengths[outcome.sample], parts = _parts(outcome, name, named)
        for role, part in parts.items():
            played.setdefault(role, {})[outcome.sample] = part
    found = {outcome.sample: [0.0] * lengths[outcome.sample] for outcome in outcomes}
    single: dict[int, list[Sequence[float]]] = {outcome.sample: [] for outcome in outcomes}
    by_sample = {outcome.sample: outcome for outcome in outcomes}
    for role, samples in played.items():
        rewards: list[float] = []
        for sample in samples:
            whole = by_sample[sample].reward
            assert whole is not None
            rewards.append(by_sample[sample].rewards.get(role, whole))
        turns_of = [dict(sorted(one.items())) for one in samples.values()]
        followed = [_whole(one.values(), to) for one, to in zip(turns_of, rewards, strict=True)]
        advantages: Sequence[Sequence[float]]
        if isinstance(estimate, TurnAdvantage):
            advantages = estimate(rewards, followed)
        else:
            advantages = [[one] for one in estimate(rewards)]
        for sample, of, values in zip(samples, turns_of, advantages, strict=True):
            single[sample].append(values)
            spread = values if len(values) == len(of) else [values[0]] * len(of)
            for turn, value in zip(of, spread, strict=True):
                found[sample][turn] = value
    return {
        sample: {pack_f32(values)}
        | {pack_f32(one) for one in single[sample] if len(single[sample]) == 1}
        for sample, values in found.items()
    }


def _parts(
    outcome: EpisodeEnded, name: str, named: Collection[str]
) -> tuple[int, dict[str, dict[int, float]]]:
    """The number of a policy's turns, and what followed those of each role, NaN if not recorded."""
    own = [use for use in outcome.policies if use.policy == name]
    numbers = sorted(turn for use in own for turn in unpack_i32(use.turns))
    parts: dict[str, dict[int, float]] = {}
    for use in (use for use in own if use.tokens and use.oldest_version >= 0):
        role = use.role if use.role in named else ""
        turns = unpack_i32(use.turns) or range(len(use.turn_rewards) // 4)
        rewards = _rewards(use) or [nan] * len(turns)
        parts.setdefault(role, {}).update(zip(turns, rewards, strict=True))
    if not numbers:
        return sum(len(use.turn_rewards) // 4 for use in own), parts
    for role, part in parts.items():
        own_reward = role and role in outcome.rewards
        followed = part if own_reward else _until_next(part, outcome)
        parts[role] = {numbers.index(turn): reward for turn, reward in followed.items()}
    return len(numbers), parts


def _rewards(use: PolicyUse) -> list[float]:
    return [0.0 if isnan(one) else one for one in unpack_f32(use.turn_rewards)]


def _until_next(part: dict[int, float], outcome: EpisodeEnded) -> dict[int, float]:
    """What followed each turn until the next one, after whichever policy's turn."""
    if any(map(isnan, part.values())):
        return part
    earned = {
        turn: reward
        for use in outcome.policies
        for turn, reward in zip(unpack_i32(use.turns), _rewards(use), strict=False)
    }
    found, last = dict.fromkeys(part, 0.0), min(part)
    for turn in sorted(earned):
        last = turn if turn in part else last
        found[last] += earned[turn]
    return found


def _whole(rewards: Iterable[float], reward: float) -> list[float]:
    """The rewards of turns, the last one changed so that their sum is the reward."""
    followed = list(rewards)
    if any(map(isnan, followed)):
        return []
    if followed and not isclose(fsum(followed), reward, rel_tol=1e-6, abs_tol=1e-6):
        followed[-1] += reward - fsum(followed)
    return followed
