"""I3, I9: each record of an item's statistics is what the groups before it give."""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from math import isclose

from headrace.schemas.events import GroupClosed, ItemMeasured
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations

Groups = list[Delivery[GroupClosed]]


def check(facts: Facts, *, complete: bool = False) -> Violations:
    """Judges all records. `complete`: each item's newest one must count its newest group."""
    groups: dict[tuple[str, str], Groups] = defaultdict(list)
    by_policy: dict[str, Groups] = defaultdict(list)
    for one in sorted(facts.all(GroupClosed), key=lambda one: one.offset):
        by_policy[one.event.policy].append(one)
        if one.event.rewarded:
            groups[one.event.policy, one.event.item_id].append(one)
    measured: dict[tuple[str, str], int] = {}
    for again in facts.again[ItemMeasured]:
        yield f"I3: ItemMeasured {again.event.event_id} is in the log twice: fencing failed"
    for record in facts.in_order(ItemMeasured):
        item = record.event
        name = f"item {item.policy}/{item.item_id} at group {item.group}"
        counted = [one for one in groups[item.policy, item.item_id] if one.offset <= item.group]
        if not counted or counted[-1].offset != item.group:
            yield f"I3: {name} counts a group that does not count"
            continue
        if item.group < measured.get((item.policy, item.item_id), -1):
            yield f"I3: {name} comes after a newer record"
        measured[item.policy, item.item_id] = item.group
        yield from _sums(item, [one.event for one in counted], name)
        yield from _progress(item, by_policy[item.policy], name)
    if complete:
        for (policy, item_id), counted in groups.items():
            if counted and measured.get((policy, item_id)) != counted[-1].offset:
                yield f"I3: item {policy}/{item_id} lacks its newest group, {counted[-1].offset}"


def _sums(item: ItemMeasured, groups: list[GroupClosed], name: str) -> Violations:
    expected = (
        len(groups),
        sum(group.rewarded for group in groups),
        sum(group.passed for group in groups),
        sum(group.sampled_tokens for group in groups),
        max(group.newest_version for group in groups),
        groups[-1].passed == groups[-1].rewarded,
    )
    found = (
        item.groups,
        item.episodes,
        item.passed,
        item.sampled_tokens,
        item.newest_version,
        item.solved,
    )
    if found != expected:
        yield f"I3: {name} has {found}, and its groups give {expected}"
    mean = sum((group.mean or 0.0) * group.rewarded for group in groups) / item.episodes
    if not isclose(item.mean, mean, rel_tol=1e-9, abs_tol=1e-9):
        yield f"I3: {name} has the mean {item.mean}, and its groups give {mean}"
    several = [group for group in groups if group.rewarded > 1]
    streak = len(list(takewhile(lambda group: group.deviation == 0, reversed(several))))
    if item.streak != streak:
        yield f"I3: {name} has the streak {item.streak}, and its groups give {streak}"


def _progress(item: ItemMeasured, groups: Groups, name: str) -> Violations:
    """A restart from this record must find every counted task again."""
    for one in groups:
        if one.offset < item.groups_read and one.event.task >= item.low_mark:
            yield f"I3: {name} reads from {item.groups_read}, and group {one.offset} is before it"
    tasks = {one.event.task for one in groups}
    if not tasks.issuperset(range(item.low_mark)):
        yield f"I3: {name} has the low mark {item.low_mark}, and not all tasks below have a group"
