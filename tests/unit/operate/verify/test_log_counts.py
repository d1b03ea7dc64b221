"""What is counted as lost, doubled and under way, in logs that were doctored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import (
    BatchAssembled,
    BatchSample,
    Dropped,
    EpisodeEnded,
    EpisodeStarted,
    Ref,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.schemas.frontier import Frontier
from headrace.services.operate.verify.log_counts import BatchCount, LogCounts, count_log
from headrace.services.operate.verify.running_count import RestartCounts
from tests.unit.checker.logs import Log, whole_log

PLACE = Ref(topic="test.trajectories.v1", partition=0, offset=0, digest=bytes(16))


def counts(log: Log, *, ended: bool = True) -> LogCounts:
    return count_log(log.deliveries, ended=ended)


def test_nothing_is_lost_or_doubled_in_a_whole_log() -> None:
    found = counts(whole_log())
    assert (found.lost, found.doubled, found.under_way) == (0, 0, 0)
    assert (found.tasks, found.episodes) == (2, 4)


def test_an_outcome_is_lost_only_once_the_run_has_ended() -> None:
    log = whole_log()
    log.without_last(EpisodeEnded)
    assert counts(log).lost_episodes == {(1, 1)}
    assert counts(log, ended=False).lost == 0


def test_a_task_without_a_result_is_under_way_and_then_lost() -> None:
    log = whole_log()
    log.without_last(TaskEnded)
    assert counts(log).lost_tasks == {1}
    live = counts(log, ended=False)
    assert (live.lost, live.under_way) == (0, 1)


def test_a_trajectory_that_is_gone_is_lost_even_while_the_run_goes_on() -> None:
    log = whole_log()
    log.without_last(TrajectoryRecorded)
    assert counts(log, ended=False).lost_episodes == {(1, 1)}


def test_a_trajectory_of_another_namespace_is_not_missed() -> None:
    log = whole_log()
    elsewhere = PLACE.model_copy(update={"topic": "other.trajectories.v1", "offset": 9})
    log.change(EpisodeEnded, trajectory=elsewhere)
    assert counts(log).lost == 0


def test_a_task_that_a_frontier_passes_is_lost() -> None:
    log = whole_log()
    log.change(BatchAssembled, dropped=())
    assert counts(log, ended=False).lost_tasks == {1}


def test_an_episode_that_is_started_twice_is_doubled() -> None:
    log = whole_log()
    log.again(EpisodeStarted)
    assert counts(log).doubled_episodes == {(1, 1)}


def test_a_task_that_two_batches_decide_is_doubled() -> None:
    log = whole_log()
    log.again(BatchAssembled, version=2)
    found = counts(log)
    assert found.doubled_tasks == {0, 1}
    assert found.doubled == 2


def test_a_batch_that_is_written_again_counts_once() -> None:
    log = whole_log()
    log.again(BatchAssembled)
    assert counts(log).doubled == 0


def test_two_results_that_differ_are_doubled() -> None:
    log = whole_log()
    log.again(TaskEnded)
    assert counts(log).doubled == 0
    log.again(TaskEnded, closed_by="cancelled")
    assert counts(log).doubled_tasks == {1}


def test_only_what_is_found_twice_still_stands() -> None:
    log = whole_log()
    log.without_last(TrajectoryRecorded)
    before = counts(log, ended=False)
    assert before.lost == 1
    assert counts(whole_log(), ended=False).still(before).lost == 0


def test_a_run_says_what_it_has_counted_after_each_restart() -> None:
    said: list[str] = []
    restarts = RestartCounts(said.append)
    log = whole_log()
    for one in log.deliveries:
        restarts.add(one.event)
    assert restarts.on_restarts(0) == 0
    assert not said
    assert restarts.on_restarts(1) == 1
    assert said[0].startswith("so far 0 lost, 0 doubled, of 2 ended tasks in 1 batches")
    log.again(TaskEnded, closed_by="cancelled")
    restarts.add(log.deliveries[-1].event)
    restarts.on_restarts(1)
    assert len(said) == 1
    restarts.on_restarts(3)
    assert "0 lost, 1 doubled" in said[1]
    assert "1 results were written again" in said[1]


@st.composite
def decisions(draw: st.DrawFn) -> tuple[list[set[int]], int, int]:
    """Tasks in the order in which batches decide them, one to be lost, and one to be doubled."""
    order = draw(st.permutations(range(12)))
    cuts = sorted(draw(st.sets(st.integers(1, 11), max_size=3)))
    batches = [set(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
    return batches, draw(st.integers(-1, 11)), draw(st.integers(-1, 11))


@pytest.mark.parametrize("drops", [False, True])
@given(decisions())
def test_batches_in_any_order_lose_and_double_just_what_they_do(
    drops: bool, made: tuple[list[set[int]], int, int]
) -> None:
    batches, lost, doubled = made
    count, frontier = BatchCount(), Frontier()
    for version, decided in enumerate(batches, 1):
        for task in decided:
            frontier.add(task)
        again = version == len(batches) and doubled >= 0 and doubled not in decided
        named = sorted(decided - {lost} | ({doubled} - {lost} if again else set()))
        count.on_batch(batch(version, named, frontier, drops=drops))
    assert count.lost == ({lost} if lost >= 0 else set())
    expected = doubled >= 0 and doubled != lost and doubled not in batches[-1]
    assert count.doubled_tasks == ({doubled} if expected else set())


def batch(version: int, named: list[int], frontier: Frontier, *, drops: bool) -> BatchAssembled:
    content: dict[str, Any] = {
        "samples": () if drops else tuple(
            BatchSample(task=task, sample=0, trajectory=PLACE, advantages=b"", tokens=1, longest=1,
                        oldest_version=0)
            for task in named
        ),
        "dropped": tuple(Dropped(task=task, reason="x") for task in named) if drops else (),
        "decided": tuple({"first": a, "last": b} for a, b in frontier.runs),
    }  # fmt: skip
    return BatchAssembled.model_validate(
        {
            "policy": "default", "version": version, "recipe": bytes(32), "seed": 0,
            "sampled_tokens": 0, "low_mark": frontier.low_mark, "groups_read": 0, **content,
        }
    )  # fmt: skip


def test_a_task_that_hangs_does_not_make_each_batch_look_at_all_tasks_since() -> None:
    """It holds the low mark, so that the runs of each frontier have all tasks since."""
    looked = 0

    class Watched(Frontier):
        def __contains__(self, number: int) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(number)

    count, frontier = BatchCount(), Frontier()
    for version in range(1, 101):
        named = list(range(10 * version, 10 * version + 10))  # Tasks 0 to 9 hang.
        for task in named:
            frontier.add(task)
        made = batch(version, named, frontier, drops=True)
        count.on_batch(made)
        count._decided = Watched(count._decided.low_mark, count._decided.runs)
    assert not count.lost
    assert looked < 10_000
