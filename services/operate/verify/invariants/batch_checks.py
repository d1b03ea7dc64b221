"""I3 and I5 for batches: what each decides, what it leaves out and why, and its frontier.

Replayed samples are judged in `replays.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import isclose
from statistics import fmean

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    Dropped,
    GroupClosed,
    PolicyPublished,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.operate.verify.invariants.replay_checks import Replays
from headrace.services.operate.verify.invariants.token_age import behind
from headrace.services.operate.verify.invariants.trajectory_checks import use_of

Behind = Callable[[int, int], int]
"""Maps an oldest token's version and the newest batch's to how many versions it is behind."""


def check(facts: Facts, recipe: Recipe, *, settled: bool) -> Violations:
    """Judges all batches. `settled`: they must have decided every task that ended."""
    for again in facts.again[BatchAssembled]:
        yield f"I3: BatchAssembled {again.event.event_id} is in the log twice: fencing failed"
    for policy in recipe.policies:
        yield from _batches(facts, recipe, policy, settled=settled)


def _batches(facts: Facts, recipe: Recipe, policy: str, *, settled: bool) -> Violations:
    settings = recipe.policies[policy].batches
    skipped = {
        one.version
        for one in facts.events(PolicyPublished)
        if one.status == "skipped" and one.policy == policy
    }
    staleness = partial(behind, prefetch=settings.prefetch, skipped=skipped)
    groups = _Groups(facts, policy)
    replays = Replays(settings, skipped)
    frontier = Frontier()
    batches = [event for event in facts.events(BatchAssembled) if event.policy == policy]
    for number, batch in enumerate(batches, 1):
        name = f"batch {policy}/{batch.version}"
        if batch.version != number:
            yield f"I5: {name} is number {number} in the log"
        if batch.recipe != recipe.digest:
            yield f"I3: {name} is of another recipe"
        after = batch.frontier()
        fresh = {one.task for one in batch.samples if one.use == 0}
        deciding = fresh | {one.task for one in batch.dropped}
        if again := sorted(task for task in deciding if task in frontier):
            yield f"I3: {name} decides {again}, which an earlier batch decided"
        for task in deciding:
            frontier.add(task)
        if (frontier.low_mark, frontier.runs) != (after.low_mark, after.runs):
            yield f"I3: {name} is said to leave {after}: with what it holds it is {frontier}"
            frontier = after
        yield from groups.read(batch, deciding, frontier, name)
        yield from _content(facts, batch, name, settings.max_staleness, staleness)
        yield from _sums(facts, batch, deciding, settings.groups, name)
        yield from replays.on_batch(batch, name)
    if settled and recipe.policies[policy].training is not None:
        for ended in facts.events(TaskEnded):
            # One to evaluate is decided by the batch after it, if there is another.
            if ended.task not in frontier and ended.purpose == "train":
                yield f"I3: task {ended.task} has ended, and no batch of {policy} decides it"


class _Groups:
    """Where a policy's groups lie."""

    def __init__(self, facts: Facts, policy: str) -> None:
        self._offsets: dict[int, int] = {}
        """Of the group that counts, by task, in the log's order."""
        records: list[Delivery[GroupClosed]] = facts.in_order(GroupClosed)
        for one in records:
            if one.event.policy == policy:
                self._offsets.setdefault(one.event.task, one.offset)

    def read(
        self, batch: BatchAssembled, deciding: set[int], frontier: Frontier, name: str
    ) -> Violations:
        """`groups_read` is the oldest group that was read and not decided, or what follows.

        All groups up to the newest one decided were read; more may have been.
        """
        decided = [self._offsets[task] for task in deciding if task in self._offsets]
        if not decided:
            return
        last = max(decided)
        missing = [offset for task, offset in self._offsets.items() if task not in frontier]
        oldest = min(missing, default=None)
        exact = oldest is not None and oldest < last
        beyond = oldest is not None and batch.groups_read > oldest
        if beyond or (exact and batch.groups_read != oldest):
            yield f"I3: {name} says that groups are read from {batch.groups_read}, not {oldest}"
        elif not exact and batch.groups_read <= last and not self._undecided(batch, frontier):
            yield f"I3: {name} reads groups from {batch.groups_read}: all to {last} are decided"

    def _undecided(self, batch: BatchAssembled, frontier: Frontier) -> bool:
        """Whether the group at `groups_read` is one to be decided yet."""
        at = [task for task, offset in self._offsets.items() if offset == batch.groups_read]
        return bool(at) and at[0] not in frontier


def _content(
    facts: Facts,
    batch: BatchAssembled,
    name: str,
    max_staleness: int,
    staleness: Behind,
) -> Violations:
    """Every sample of the groups that a batch decides is in it once, or dropped.

    What the policy sampled of a group is trained whole or dropped whole.
    """
    held: dict[int, list[int]] = defaultdict(list)
    for sample in (one for one in batch.samples if one.use == 0):
        held[sample.task].append(sample.sample)
        yield from _sample(facts, batch, sample, f"{name}: {sample.task}/{sample.sample}")
        old = _behind(facts, batch, sample.task, sample.sample, staleness)
        if old is not None and old > max_staleness:
            yield f"I5: {name}: {sample.task}/{sample.sample} is {old} versions behind"
    whole = set()
    sampled = {one.task for one in batch.samples if one.oldest_version >= 0 and one.use == 0}
    for drop in batch.dropped:
        yield from _dropped(facts, batch, drop, max_staleness, name, staleness)
        if drop.task in sampled:
            yield f"I5: {name}: task {drop.task} is trained in part: advantages belong together"
        if drop.sample < 0:
            whole.add(drop.task)
        else:
            held[drop.task].append(drop.sample)
    for task in whole & held.keys():
        yield f"I3: {name}: task {task} is dropped as a whole, and in part"
    for task, samples in held.items():
        group = facts.get(GroupClosed, task, batch.policy)
        expected = sorted(one.sample for one in group.samples) if group is not None else []
        if task not in whole and sorted(samples) != expected:
            yield f"I3: {name}: task {task} has samples {expected}, it holds {sorted(samples)}"


def _sample(facts: Facts, batch: BatchAssembled, sample: BatchSample, name: str) -> Violations:
    group = facts.get(GroupClosed, sample.task, batch.policy)
    ours = {one.sample: one for one in group.samples} if group is not None else {}
    one = ours.get(sample.sample)
    if one is None or one.trajectory != sample.trajectory:
        yield f"I3: {name} is not that of its group"
    elif sample.model_dump(include=_SHARED) != one.model_dump(include=_SHARED):
        yield f"I3: {name} differs from its group's"
    if sample.weight != 1.0:
        yield f"I3: {name} is fresh, and weighs {sample.weight}"


_SHARED = {"advantages", "tokens", "longest", "oldest_version"}


def _behind(
    facts: Facts,
    batch: BatchAssembled,
    task: int,
    sample: int,
    staleness: Behind,
) -> int | None:
    """How many versions a sample's oldest token is behind the batch's start, by its trajectory.

    What was demonstrated never is.
    """
    group = facts.get(GroupClosed, task, batch.policy)
    found = [one for one in group.samples if one.sample == sample] if group is not None else []
    trajectory = facts.resolve(found[0].trajectory) if found else None
    use = use_of(trajectory, batch.policy) if isinstance(trajectory, TrajectoryRecorded) else None
    return None if use is None else staleness(use.oldest_version, batch.version - 1)


def _dropped(
    facts: Facts,
    batch: BatchAssembled,
    drop: Dropped,
    max_staleness: int,
    name: str,
    staleness: Behind,
) -> Violations:
    """What is left out has a reason, and the reason holds."""
    name = f"{name}: {drop.task}/{drop.sample}"
    group = facts.get(GroupClosed, drop.task, batch.policy)
    if not drop.reason:
        yield f"I3: {name} is dropped without a reason"
    elif group is None:
        yield f"I3: {name} is dropped, and is of no group"
    elif group.verdict == "dropped":
        if drop.sample >= 0 or drop.reason != group.reason:
            yield f"I3: {name} is dropped as {drop.reason}, its group as {group.reason}"
    elif drop.reason == "stale":
        old = [_behind(facts, batch, drop.task, one.sample, staleness) for one in group.samples]
        known = [one for one in old if one is not None]
        if len(known) == len(old) and max(known, default=0) <= max_staleness:
            yield f"I5: {name} is dropped as stale, and is {max(known)} versions behind"


def _sums(
    facts: Facts, batch: BatchAssembled, deciding: set[int], groups: int, name: str
) -> Violations:
    if batch.sampled_tokens != (tokens := sum(sample.tokens for sample in batch.samples)):
        yield f"I3: {name} counts {batch.sampled_tokens} tokens, its samples have {tokens}"
    if (held := len({sample.task for sample in batch.samples})) > groups:
        yield f"I3: {name} holds {held} groups, at most {groups} are one"
    found = [facts.get(GroupClosed, task, batch.policy) for task in deciding]
    means = [one.mean for one in found if one is not None and one.mean is not None]
    expected = fmean(means) if means else None
    if (batch.reward_mean is None) != (expected is None) or (
        batch.reward_mean is not None
        and expected is not None
        and not isclose(batch.reward_mean, expected, abs_tol=1e-12)
    ):
        yield f"I3: {name} has reward {batch.reward_mean}, that of its tasks is {expected}"
