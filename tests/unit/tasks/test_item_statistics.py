"""The statistics of items: what counts, and that crashes and repeats change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import GroupClosed, ItemMeasured
from headrace.services.tasks.curation import item_statistics
from headrace.services.tasks.curation.item_statistics import (
    CountedTasks,
    ItemRecord,
    ItemStatistics,
)


def a_closed_group(task: int, item_id: str, *rewards: float, **changes: Any) -> GroupClosed:
    """The group of a task whose samples have these rewards. Without rewards it is dropped."""
    fields: dict[str, Any] = {
        "task": task,
        "policy": "default",
        "item_id": item_id,
        "verdict": "scored" if len(set(rewards)) > 1 else "dropped",
        "ended": 1000 + task,
    }
    if rewards:
        mean = sum(rewards) / len(rewards)
        fields |= {
            "mean": mean,
            "deviation": (sum((one - mean) ** 2 for one in rewards) / len(rewards)) ** 0.5,
            "rewarded": len(rewards),
            "passed": sum(one >= 1.0 for one in rewards),
            "sampled_tokens": 10 * len(rewards),
            "newest_version": task // 4,
        }
    return GroupClosed(**{**fields, **changes})


def folded(*groups: GroupClosed) -> ItemStatistics:
    statistics = ItemStatistics("default")
    for offset, group in enumerate(groups):
        statistics.on_group(group, offset)
    return statistics


def record_of(statistics: ItemStatistics, item_id: str) -> ItemRecord:
    record = statistics.get(item_id)
    assert record is not None
    return record


def test_an_item_has_the_sums_of_its_groups() -> None:
    statistics = folded(
        a_closed_group(0, "a", 1.0, 0.0, 0.0, 0.0),
        a_closed_group(1, "b", 0.0, 0.0),
        a_closed_group(2, "a", 1.0, 1.0, 1.0, 0.0),
    )
    record = record_of(statistics, "a")
    assert (record.groups, record.episodes, record.passed, record.pass_rate) == (2, 8, 4, 0.5)
    assert record.mean == pytest.approx(0.5)
    assert record.recent == 0.5, "with two groups each weighs a half"
    assert (record.group, record.sampled_tokens, record.newest_version) == (2, 80, 0)
    assert record.ended == 1002
    assert statistics.get("c") is None
    assert list(statistics) == ["a", "b"]


def test_newer_groups_weigh_more_in_the_recent_pass_rate() -> None:
    groups = [a_closed_group(task, "a", 0.0, 0.0) for task in range(20)]
    record = record_of(folded(*groups, a_closed_group(20, "a", 1.0, 1.0)), "a")
    assert record.recent == 0.25
    assert record.pass_rate == 2 / 42


def test_a_streak_counts_groups_of_equal_rewards_and_a_single_reward_leaves_it() -> None:
    equal, mixed = (0.0, 0.0), (0.0, 1.0)
    groups = [a_closed_group(task, "a", *one) for task, one in enumerate((mixed, equal, equal))]
    assert record_of(folded(*groups), "a").streak == 2
    single = a_closed_group(3, "a", 1.0)
    assert record_of(folded(*groups, single), "a").streak == 2
    assert record_of(folded(*groups, single), "a").solved
    assert record_of(folded(*groups, single, a_closed_group(4, "a", *mixed)), "a").streak == 0


@pytest.mark.parametrize("reason", ["evaluate", "cancelled", "refused", "all_failed"])
def test_a_group_without_a_reward_says_nothing_about_its_item(reason: str) -> None:
    statistics = folded(a_closed_group(0, "a", reason=reason))
    assert statistics.get("a") is None
    assert statistics.take_changed() == []
    assert statistics.tasks.low_mark == 1, "its task is counted as read"


def test_a_group_that_a_filter_dropped_counts() -> None:
    group = a_closed_group(0, "a", 1.0, 1.0, verdict="dropped", reason="zero_advantage")
    assert record_of(folded(group), "a").solved


def test_a_late_second_group_of_a_task_changes_nothing() -> None:
    first = [a_closed_group(task, f"item {task % 3}", 1.0, 0.0) for task in (0, 1, 5, 2, 3)]
    late = [a_closed_group(task, f"item {task % 3}", 1.0, 1.0) for task in (5, 0, 3)]
    once, twice = folded(*first), folded(*first, *late)
    assert [twice.get(item) for item in once] == [once.get(item) for item in once]
    assert (twice.tasks.low_mark, twice.tasks.groups_read) == (4, 2)
    assert twice.tasks.newest == 7


def test_what_changed_is_taken_once() -> None:
    statistics = folded(*(a_closed_group(task, f"{task % 2}", 1.0) for task in range(4)))
    taken = statistics.take_changed()
    assert [(one.item_id, one.group, one.groups_read) for one in taken] == [
        ("0", 2, 4),
        ("1", 3, 4),
    ]
    assert statistics.take_changed() == []


def test_many_items_grow_the_array() -> None:
    statistics = folded(*(a_closed_group(task, f"{task}", task % 2) for task in range(5_000)))
    assert len(statistics) == 5_000
    assert all(record_of(statistics, f"{task}").passed == task % 2 for task in range(5_000))


REWARDS = st.lists(st.sampled_from([0.0, 0.3, 1.0]), max_size=3).map(tuple)
GROUPS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), REWARDS), max_size=40)


def plainly(groups: Sequence[GroupClosed]) -> dict[str, tuple[int, int, int, int]]:
    """Groups, episodes, passes and newest group of each item, by a fold without any state."""
    found: dict[str, tuple[int, int, int, int]] = {}
    seen: set[int] = set()
    for offset, group in enumerate(groups):
        if group.task not in seen and group.rewarded:
            before = found.get(group.item_id, (0, 0, 0, 0))
            found[group.item_id] = (
                before[0] + 1,
                before[1] + group.rewarded,
                before[2] + group.passed,
                offset,
            )
        seen.add(group.task)
    return found


@given(drawn=GROUPS, crashes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12))))
def test_crashes_at_any_point_give_the_statistics_of_an_undisturbed_run(
    drawn: list[tuple[int, int, tuple[float, ...]]], crashes: list[tuple[int, int]]
) -> None:
    groups = [a_closed_group(task, f"item {item}", *rewards) for task, item, rewards in drawn]
    whole = folded(*groups)
    compacted: dict[str, ItemMeasured] = {}
    for written, lost in [*crashes, (len(groups), 0)]:
        statistics = ItemStatistics("default")
        for event in compacted.values():
            statistics.restore(event)
        position = first = statistics.tasks.groups_read
        again = max(0, statistics.tasks.newest + 1 - first)
        for limit, writes in ((again + written, True), (lost, False)):
            for offset in range(position, min(position + limit, len(groups))):
                statistics.on_group(groups[offset], offset)
                position = offset + 1
            if writes:
                # Newer records of a key come last, as in a topic that was compacted.
                for event in statistics.take_changed():
                    compacted.pop(event.item_id, None)
                    compacted[event.item_id] = event
    restored = ItemStatistics("default")
    for event in compacted.values():
        restored.restore(event)
    assert {item: restored.get(item) for item in restored} == {
        item: whole.get(item) for item in whole
    }
    assert {
        item: (one.groups, one.episodes, one.passed, one.group)
        for item in restored
        if (one := restored.get(item)) is not None
    } == plainly(groups)


@given(tasks=st.lists(st.integers(0, 15)), at=st.integers(0, 40))
def test_a_set_of_tasks_that_was_read_again_is_the_same(tasks: list[int], at: int) -> None:
    whole = CountedTasks()
    verdicts = []
    kept = (0, 0, -1)
    for offset, task in enumerate(tasks):
        if offset == at:
            kept = (whole.low_mark, whole.groups_read, whole.newest)
        verdicts.append(whole.add(a_closed_group(task, "a"), offset))
    again = CountedTasks(*kept)
    for offset in range(kept[1], len(tasks)):
        counted = again.add(a_closed_group(tasks[offset], "a"), offset)
        assert counted == (verdicts[offset] and offset > kept[2])
    assert (again.low_mark, again.groups_read) == (whole.low_mark, whole.groups_read)


@given(
    drawn=st.lists(st.integers(0, 60).filter(lambda task: task % 7 != 3), max_size=80),
    at=st.integers(0, 60),
)
def test_a_number_without_a_group_keeps_nothing_for_ever(drawn: list[int], at: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_statistics, "WINDOW", 8)
        whole = CountedTasks()
        kept = (0, 0, -1)
        verdicts = []
        for offset, task in enumerate(drawn):
            if offset == at:
                kept = (whole.low_mark, whole.groups_read, whole.newest)
            verdicts.append(whole.add(a_closed_group(task, "a"), offset))
            assert offset + 1 - whole.groups_read <= 8 + 1
        again = CountedTasks(*kept)
        for offset in range(kept[1], len(drawn)):
            counted = again.add(a_closed_group(drawn[offset], "a"), offset)
            assert counted == (verdicts[offset] and offset > kept[2])
