"""What the trainer and the batches of a policy wait for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from headrace.schemas.version_barrier import is_ahead, others_of
from headrace.services.operate.waits.found_wait import Wait
from headrace.services.operate.waits.run_facts import RunFacts
from headrace.services.operate.waits.service_waits import ServiceWaits

LATE_S, LATE_TIMES = 60.0, 5.0
"""A version that takes longer than this, and so many times as long as the last one, is late."""
FIRST_S = 1_800.0
"""The same, if no version was trained before."""
MANY = 8
"""So many groups in a row that were dropped are a reason to look at the filters."""


def trainer_wait(
    facts: RunFacts, services: ServiceWaits, policy: str, now: float
) -> Iterator[Wait]:
    """Yields what the trainer of a policy waits for, or what it does."""
    one, name = facts.policies[policy], f"trainer/{policy}"
    label, more = f"trainer of {policy}", f"headrace status --policy {policy}"
    if one.trained and 0 <= one.version >= one.batch:
        yield Wait(
            name, "trainer", label, one.published_at, (f"batch/{policy}",),
            f"it has published version {one.version} and has no batch {one.version + 1}",
            f"headrace tail batches.{policy}",
        )  # fmt: skip
        return
    if one.version >= 0 and not one.trained:
        return  # a policy that does not learn needs its trainer for version 0 only
    first = one.version < 0
    batch_at = one.batch_times.get(one.version + 1, one.batch_at)
    since = facts.started_at if first else max(one.published_at, batch_at)
    if first:
        cause = "it has not published version 0 yet, without which nothing starts"
    else:
        cause = f"it trains version {one.version + 1}"
    late_s = max(LATE_S, LATE_TIMES * one.step_s) if one.step_s else FIRST_S
    late = now - since > late_s
    if late and not first:
        last = f" than the last one took ({one.step_s:.3g} s)" if one.step_s else ""
        cause += f", for far longer{last}" if last else ", for very long"
    on = services.problems(policy, "disk", "blobs")
    absent = services.sole("trainer", policy, since)
    on = (*on, absent) if absent is not None else on
    busy = not (first or late or on)
    yield Wait(name, "trainer", label, since, on, cause, _log_of("trainer", more), busy)


def batch_wait(
    facts: RunFacts, services: ServiceWaits, policy: str, below: tuple[str, ...], now: float
) -> Iterator[Wait]:
    """Yields what the next batch of a policy waits for. `below`: the groups or tasks under way."""
    one, number = facts.policies[policy], facts.policies[policy].version + 1
    name, label = f"batch/{policy}", f"batch {number} of {policy}"
    since = max(one.published_at, one.batch_at)
    more = f"headrace tail groups.{policy}"
    held = _held(facts, policy, number)
    if held:
        who = " and ".join(held)
        yield Wait(
            name, "batch", label, since, tuple(f"trainer/{other}" for other in held),
            f"the version barrier holds it: {who} must publish first (at most "
            f"{_versions_ahead(facts)} ahead)",
            f"see why {who} is slow; barrier.versions in the recipe of a new run allows more",
        )  # fmt: skip
        return
    has = f"{one.scored:,} of {one.needed:,} groups are there"
    if one.scored >= one.needed:
        scored = sorted(group.at for group in one.groups.values() if not group.reason)
        since = max(since, scored[one.needed - 1])
        absent = services.sole("assemble-batches", policy, since)
        yield _full_wait(Wait(name, "batch", label, since, (), has, more), policy, below, absent)
        return
    if (reason := _all_dropped(facts, policy)) is not None:
        yield Wait(
            name,
            "batch",
            label,
            since,
            (),
            reason,
            f"`{more}` shows them. Change {_filters(policy)}",
        )
        return
    group = services.group("assemble-groups", since) if _lag(facts, "assemble-groups") else None
    if group is not None:
        yield Wait(name, "batch", label, since, (group,), f"{has}, and tasks that ended have none",
                   more)  # fmt: skip
        return
    on = below
    cause = has + _drops(facts, policy)
    if not below and (facts.more_episodes or facts.more_tasks):
        cause += f"; {facts.more_episodes:,} episodes and {facts.more_tasks:,} tasks are not listed"
    elif not below:
        source = services.sole("source", "", since) if facts.recipe.tasks.use else None
        on = () if source is None else (source,)
        cause += "; no episode is live and no task waits: nothing is left to play"
    yield Wait(name, "batch", label, since, on, cause, more)


def _full_wait(wait: Wait, policy: str, below: tuple[str, ...], absent: str | None) -> Wait:
    """Returns what a batch waits for whose groups are all there.

    `wait` has their number as its cause. `absent` is the job that makes batches, if it does not
    run.
    """
    groups = tuple(each for each in below if each.startswith("group/"))
    if absent is None and groups:
        cause = (
            f"{wait.cause}. It may wait for live groups that it would make stale; "
            f"policies.{policy}.batches.straggler_wait_s in the recipe of a new run bounds that"
        )
        return replace(wait, on=groups, cause=cause)
    return replace(
        wait,
        on=() if absent is None else (absent,),
        cause=f"{wait.cause}, and no batch was made of them",
        help=_log_of("assemble-batches", wait.help),
    )


def _held(facts: RunFacts, policy: str, number: int) -> list[str]:
    """Returns the policies that the barrier makes a policy's next batch wait for."""
    if facts.recipe.barrier is None:
        return []
    ahead, known = facts.recipe.barrier.versions, facts.policies
    return [
        other
        for other in others_of(facts.recipe, policy)
        if is_ahead(number, known[other].version if known[other].version >= 0 else None, ahead)
    ]


def _versions_ahead(facts: RunFacts) -> str:
    assert facts.recipe.barrier is not None
    return f"{facts.recipe.barrier.versions} version" + "s" * (facts.recipe.barrier.versions > 1)


def _all_dropped(facts: RunFacts, policy: str) -> str | None:
    """Returns what is dropped, if no group since the newest batch may be trained on."""
    one = facts.policies[policy]
    dropped = one.dropped()
    if one.scored or dropped.total() < min(MANY, one.needed):
        if one.batch_samples or not one.batch_dropped or one.scored or one.groups:
            return None
        dropped = one.batch_dropped
    reason, times = dropped.most_common(1)[0]
    return (
        f"everything is dropped: of {dropped.total():,} groups since version "
        f"{one.version if dropped is not one.batch_dropped else one.version - 1}, "
        f"{times:,} for {reason!r}, and the others for other reasons"
        if len(dropped) > 1
        else f"everything is dropped: all {times:,} groups, for {reason!r}"
    )


def _drops(facts: RunFacts, policy: str) -> str:
    dropped: Counter[str] = facts.policies[policy].dropped()
    if not dropped:
        return ""
    reason, times = dropped.most_common(1)[0]
    return f"; {dropped.total():,} were dropped, {times:,} of them for {reason!r}"


def _filters(policy: str) -> str:
    return f"policies.{policy}.groups.filters, the rewards or the tasks, in a new run"


def _lag(facts: RunFacts, service: str) -> int:
    found = facts.members.get(service)
    return 0 if found is None else found.lag


def _log_of(service: str, more: str) -> str:
    return f"the log of {service} says what it does; see `{more}`"
