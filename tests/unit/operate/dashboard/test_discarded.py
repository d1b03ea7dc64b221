"""The dashboard's list of what was not trained on."""

from __future__ import annotations

from time import process_time

from headrace.schemas.events import BatchAssembled, Dropped, Exclusion, GroupClosed
from headrace.services.operate.dashboard.index.discarded import Discarded

EACH = 1_000
"""Samples that each group leaves out."""


def group(number: int) -> GroupClosed:
    excluded = tuple(Exclusion(sample=sample, reason="no_reward") for sample in range(EACH))
    return GroupClosed(
        task=number, policy="default", item_id="1", verdict="scored", excluded=excluded
    )


def test_the_oldest_rows_are_forgotten_and_still_counted() -> None:
    discarded = Discarded(most=EACH)
    discarded.on_group(group(1), 1.0)
    discarded.on_group(group(2), 2.0)
    assert {row.task for row in discarded.rows(None, None)} == {2}
    (reason,) = discarded.reasons()
    assert (reason["count"], reason["first"], reason["last"]) == (2 * EACH, 1.0, 2.0)


def test_a_forgotten_group_is_not_counted_again_by_its_batch() -> None:
    discarded = Discarded(most=5)
    for task in range(20):
        discarded.on_group(
            GroupClosed(
                task=task, policy="default", item_id="1", verdict="dropped", reason="equal"
            ),
            1.0,
        )
    dropped = tuple(Dropped(task=task, sample=-1, reason="equal") for task in range(20))
    batch = BatchAssembled(
        policy="default", version=1, recipe=bytes(32), seed=0, samples=(), sampled_tokens=0,
        low_mark=20, groups_read=20, dropped=dropped,
    )  # fmt: skip
    discarded.on_batch(batch, 2.0)
    assert sum(one["count"] for one in discarded.reasons()) == 20
    assert {row.version for row in discarded.rows(None, None)} == {1}


def test_a_batch_that_was_read_before_its_group_counts_once_by_the_groups_reason() -> None:
    discarded = Discarded()
    discarded.on_batch(
        BatchAssembled(
            policy="default", version=1, recipe=bytes(32), seed=0, samples=(), sampled_tokens=0,
            low_mark=1, groups_read=1, dropped=(Dropped(task=0, sample=-1, reason="equal"),),
        ),
        2.0,
    )  # fmt: skip
    discarded.on_group(
        GroupClosed(task=0, policy="default", item_id="1", verdict="dropped", reason="equal"), 1.0
    )
    assert [(one["kind"], one["count"]) for one in discarded.reasons()] == [("group", 1)]


def test_forgetting_does_not_slow_down_as_more_are_forgotten() -> None:
    full = 50
    discarded = Discarded(most=full * EACH)
    seconds = []
    for number in range(2 * full):
        closed = group(number)
        began = process_time()
        discarded.on_group(closed, float(number))
        seconds.append(process_time() - began)
    filling, forgetting = seconds[:full], seconds[full:]
    assert sorted(forgetting)[-10] < 4 * sorted(filling)[full // 2]
