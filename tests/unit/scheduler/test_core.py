"""What the scheduler decides: order, limits, room, verdicts, and recovery."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import (
    EnvironmentUse,
    EpisodeStarted,
    Sampling,
    TaskCancelled,
    TaskSubmitted,
    Use,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.core import SchedulerCore
from headrace.services.tasks.admission import MAX_TASK_CHARACTERS
from tests.whole_core import WholeCore


def recipe(groups: int = 2, max_staleness: int = 1, prefetch: int = 1, **limits: Any) -> Recipe:
    batches = {"groups": groups, "max_staleness": max_staleness, "prefetch": prefetch}
    policies = {"default": {"model": "tiny-llama", "batches": batches}}
    limits = {"live_episodes": 1024, "require_reports": False, **limits}
    return Recipe.model_validate({"name": "test", "policies": policies, "scheduler": limits})


def task(number: int, **changes: Any) -> TaskSubmitted:
    fields: dict[str, Any] = {
        "source": "test",
        "task_id": str(number),
        "item_id": str(number),
        "agent": "default",
        "environment": EnvironmentUse(use="default"),
        "roles": {"policy": Use(policy="default", sampling=Sampling(max_tokens=8))},
        "samples": 2,
        "max_turns": 10,
        "max_tokens": 100,
        "deadline_s": 60,
    }
    return TaskSubmitted(**{**fields, **changes})


def start_all(core: WholeCore, now_s: float = 1.0) -> list[EpisodeStarted]:
    """Starts whatever may start, as the shell does."""
    starts: list[EpisodeStarted] = []
    while started := core.next_start(now_s):
        for start in started:
            core.on_started(start)
        starts += started
    return starts


def numbers(starts: list[EpisodeStarted]) -> list[int]:
    return list(dict.fromkeys(start.task for start in starts))


def end(core: WholeCore, number: int, samples: int = 2) -> None:
    for sample in range(samples):
        core.on_outcome(number, sample)


def test_nothing_starts_before_version_0() -> None:
    core = WholeCore(recipe())
    core.on_task(0, task(0))
    assert start_all(core) == []
    core.on_policy("default", 0)
    assert numbers(start_all(core)) == [0]


def test_tasks_start_in_submission_order_up_to_the_room() -> None:
    core = WholeCore(recipe(groups=2, max_staleness=1))
    core.on_policy("default", 0)
    for number in range(10):
        core.on_task(number, task(number))
    assert numbers(start_all(core)) == [0, 1, 2, 3]  # (0 - 0 + 1 + 1) * 2
    core.on_batch("default", 1, Frontier(2))
    assert numbers(start_all(core)) == []  # (0 - 1 + 2) * 2 - 2 undecided
    core.on_policy("default", 1)
    assert numbers(start_all(core)) == [4, 5]


def test_a_dropped_group_gives_its_room_back() -> None:
    core = WholeCore(recipe(groups=1, max_staleness=0))
    core.on_policy("default", 0)
    for number in range(3):
        core.on_task(number, task(number))
    assert numbers(start_all(core)) == [0]
    core.on_group("default", 0, oldest=None)
    assert numbers(start_all(core)) == [1]
    core.on_group("default", 1, oldest=0)
    assert numbers(start_all(core)) == []


def test_a_stale_group_gives_its_room_back_before_a_batch_decides_it() -> None:
    core = WholeCore(recipe(groups=1, max_staleness=1))
    core.on_policy("default", 0)
    for number in range(5):
        core.on_task(number, task(number))
    assert numbers(start_all(core)) == [0, 1]
    for version in (1, 2):
        core.on_policy("default", version)
        core.on_batch("default", version, Frontier())
    assert numbers(start_all(core)) == []
    core.on_group("default", 0, oldest=0)
    assert numbers(start_all(core)) == [2], "batch 3 starts from version 2: 0 is two behind"
    core.on_group("default", 1, oldest=1)
    assert numbers(start_all(core)) == []
    core.on_policy("default", 3)
    core.on_batch("default", 3, Frontier())
    assert numbers(start_all(core)) == [3], "now 1 is two behind"


def test_nothing_starts_to_wait_for_a_trainer_that_has_enough() -> None:
    core = WholeCore(recipe(groups=1, max_staleness=8, prefetch=1, live_episodes=6))
    core.on_policy("default", 0)
    for number in range(9):
        core.on_task(number, task(number))
    assert numbers(start_all(core)) == [0, 1, 2]
    for number in (0, 1, 2):
        end(core, number)
        core.on_group("default", number, oldest=0)
    core.on_batch("default", 1, Frontier(1))
    assert numbers(start_all(core)) == [], "batch 1 is in training, and two full ones wait"
    assert core.room() == {"default": 0}
    core.on_batch("default", 2, Frontier(2))
    assert numbers(start_all(core)) == [3, 4, 5]


def test_a_skipped_version_makes_nothing_stale() -> None:
    core = WholeCore(recipe(groups=1, max_staleness=0, prefetch=0))
    core.on_policy("default", 0)
    core.on_task(0, task(0))
    core.on_task(1, task(1))
    assert numbers(start_all(core)) == [0]
    core.on_group("default", 0, oldest=0)
    core.on_policy("default", 1, skipped=True)
    core.on_batch("default", 1, Frontier())
    assert numbers(start_all(core)) == []


def test_a_start_says_which_versions_were_the_newest() -> None:
    core = WholeCore(recipe())
    core.on_policy("default", 3)
    core.on_task(0, task(0))
    assert {tuple(start.versions.items()) for start in start_all(core)} == {(("default", 3),)}


def test_live_episodes_are_limited_and_a_large_task_still_runs() -> None:
    core = WholeCore(recipe(groups=100, live_episodes=4))
    core.on_policy("default", 0)
    for number in range(3):
        core.on_task(number, task(number))
    core.on_task(3, task(3, samples=9))
    assert numbers(start_all(core)) == [0, 1]
    end(core, 0)
    assert numbers(start_all(core)) == [2]
    end(core, 1)
    assert numbers(start_all(core)) == []
    end(core, 2)
    assert numbers(start_all(core)) == [3]
    assert core.live == 9


def test_starts_a_second_are_limited() -> None:
    core = WholeCore(recipe(groups=100, starts_per_s=2.0))
    core.on_policy("default", 0)
    for number in range(2):
        core.on_task(number, task(number))
    assert numbers(start_all(core, 10.0)) == [0]
    assert core.wait_s(10.0) == 1.0
    assert numbers(start_all(core, 11.0)) == [1]


def test_a_clock_that_was_an_hour_ahead_holds_nothing_up_once_it_is_right() -> None:
    core = WholeCore(recipe(groups=100, starts_per_s=2.0))
    core.on_policy("default", 0)
    for number in range(2):
        core.on_task(number, task(number))
    assert numbers(start_all(core, 3_610.0)) == [0]
    assert core.wait_s(10.0) == 0.0
    assert numbers(start_all(core, 10.0)) == [1]


def test_what_cannot_run_is_started_with_a_verdict_as_one_episode() -> None:
    core = WholeCore(recipe())
    wrong = {
        "unknown_agent": task(0, agent="none"),
        "unknown_environment": task(1, environment=EnvironmentUse(use="none")),
        "unknown_policy": task(
            2, roles={"policy": Use(policy="none", sampling=Sampling(max_tokens=1))}
        ),
        "bad_task": task(3, payload="[" * 100_000),
    }
    for number, submitted in enumerate(wrong.values()):
        core.on_task(number, submitted)
    core.on_task(4, task(4, samples=0))
    starts = start_all(core)
    assert [s.verdict.code for s in starts if s.verdict] == [*wrong, "bad_task"]
    assert [(s.sample, s.submitted.samples) for s in starts] == [(0, 1)] * 5
    for number in range(5):
        end(core, number, samples=1)
        assert core.finished(number)


def test_a_second_submission_is_a_duplicate_within_the_window() -> None:
    core = WholeCore(recipe(groups=100, duplicates_window=3))
    core.on_policy("default", 0)
    starts = []
    for number, name in enumerate([1, 1, 2, 3, 4, 1]):
        core.on_task(number, task(name))
        starts += start_all(core)
    assert {s.task: s.verdict.code for s in starts if s.verdict} == {1: "duplicate"}


def test_a_second_submission_is_a_duplicate_as_long_as_the_first_one_waits() -> None:
    core = WholeCore(recipe(groups=100, duplicates_window=3))
    for number in range(5_000):
        core.on_task(number, task(number))
    core.on_task(5_000, task(0))
    core.on_cancelled(cancel(1))
    verdicts = {s.task: s.verdict.code for s in start_all(core) if s.verdict}
    assert verdicts == {5_000: "duplicate", 1: "cancelled"}


def test_a_task_that_the_log_no_longer_holds_ends_as_lost() -> None:
    core = SchedulerCore(recipe(groups=100))
    core.on_policy("default", 0)
    core.on_task(0, task(0))
    core.on_lost(7)
    for number in (7, 0):
        chosen = core.choose(1.0)
        assert chosen is not None
        (start,) = core.starts(chosen, None, 1.0)
        assert start.verdict is not None
        assert (start.task, start.verdict.code, start.submitted.samples) == (number, "lost", 1)
    assert (core.live, core.refused.live, core.room()) == (0, 2, {"default": 200})
    for number in (0, 7):
        core.on_outcome(number, 0)
        assert core.finished(number)
    assert core.refused.live == 0


def test_ending_cancels_what_waits_and_what_comes() -> None:
    core = WholeCore(recipe())
    core.on_task(0, task(0))
    core.end()
    core.on_task(1, task(1))
    starts = start_all(core)
    assert [s.verdict.code for s in starts if s.verdict] == ["cancelled", "cancelled"]


def cancel(number: int, source: str = "test") -> TaskCancelled:
    return TaskCancelled(source=source, task_id=str(number), reason="a mistake")


def test_a_cancelled_task_that_waits_is_started_with_a_verdict_at_once() -> None:
    core = WholeCore(recipe())  # no room before version 0
    for number in range(3):
        core.on_task(number, task(number))
    core.on_cancelled(cancel(1))
    core.on_cancelled(cancel(1))
    core.on_cancelled(cancel(2, source="another"))
    (start,) = start_all(core)
    assert (start.task, start.sample, start.submitted.samples) == (1, 0, 1)
    assert start.verdict is not None
    assert (start.verdict.origin, start.verdict.code) == ("operator", "cancelled")
    assert start.verdict.message == "a mistake"
    assert core.queued == 2
    core.on_policy("default", 0)
    assert numbers(start_all(core)) == [0, 2]
    end(core, 1, samples=1)
    assert core.finished(1)


def test_a_task_cancelled_before_it_is_submitted_is_not_run() -> None:
    core = WholeCore(recipe())
    core.on_policy("default", 0)
    core.on_cancelled(cancel(0))
    core.on_task(0, task(0))
    assert [start.verdict.code for start in start_all(core) if start.verdict] == ["cancelled"]


def test_cancelling_what_was_started_or_never_submitted_changes_nothing() -> None:
    core = WholeCore(recipe())
    core.on_policy("default", 0)
    core.on_task(0, task(0))
    assert numbers(start_all(core)) == [0]
    core.on_cancelled(cancel(0))
    core.on_cancelled(cancel(99))
    assert start_all(core) == []
    assert core.live == 2


@given(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9).map(lambda n: -1 - n))))
def test_whatever_is_cancelled_when_each_task_starts_once_and_in_order(acts: list[int]) -> None:
    """Tasks come in order; n >= 0 cancels task n, n < 0 lets that many version's rooms open."""
    core = WholeCore(recipe(groups=1, max_staleness=0))
    cancelled: set[int] = set()
    starts: list[EpisodeStarted] = []
    submitted = version = 0
    for act in [*acts, *[-10] * 20]:
        if submitted < 10:
            core.on_task(submitted, task(submitted))
            submitted += 1
        if act >= 0:
            core.on_cancelled(cancel(act))
            cancelled.add(act)
        else:
            core.on_policy("default", version)
            core.on_batch("default", version, Frontier(submitted))
            version += 1
        starts += start_all(core)
    run = [start.task for start in starts if start.verdict is None and start.sample == 0]
    verdicts = [start.task for start in starts if start.verdict is not None]
    assert sorted(run + verdicts) == list(range(submitted))
    assert run == sorted(run)
    assert set(verdicts) <= cancelled


def test_a_task_is_finished_when_it_has_ended_and_is_decided() -> None:
    core = WholeCore(recipe())
    core.on_policy("default", 0)
    core.on_task(0, task(0))
    start_all(core)
    end(core, 0)
    assert not core.finished(0)
    core.on_batch("default", 1, Frontier(1))
    assert core.finished(0)


def test_samples_have_seeds_of_their_own() -> None:
    core = WholeCore(recipe(groups=100))
    core.on_policy("default", 0)
    for number in range(4):
        core.on_task(number, task(number))
    seeds = [start.seed for start in start_all(core)]
    assert len(set(seeds)) == 8


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_a_successor_knows_what_its_predecessor_knew(data: st.DataObject) -> None:
    """Whatever the order in which catching up reads the topics, room and live episodes agree."""
    core = WholeCore(recipe(groups=2, max_staleness=2))
    log: list[tuple[str, Any]] = []
    submitted = [task(number) for number in range(12)]
    for number, one in enumerate(submitted):
        core.on_task(number, one)
    core.on_policy("default", 0)
    version = batch = 0
    decided = Frontier()
    undecided: list[int] = []
    starts: list[EpisodeStarted] = []
    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["start", "end", "drop", "batch", "publish"]))
        if step == "start" and (started := core.next_start(1.0)):
            starts += started
            undecided.append(started[0].task)
            for start in started:
                core.on_started(start)
        elif step == "end" and starts:
            start = data.draw(st.sampled_from(starts))
            log.append(("outcome", (start.task, start.sample)))
            core.on_outcome(start.task, start.sample)
        elif step == "drop" and undecided:
            number = undecided.pop(data.draw(st.integers(0, len(undecided) - 1)))
            log.append(("group", number))
            core.on_group("default", number, oldest=None)
        elif step == "batch" and undecided and batch <= version:
            batch += 1
            decided.add(undecided.pop(0))
            core.on_batch("default", batch, Frontier(decided.low_mark, decided.runs))
        elif step == "publish" and version < batch:
            version += 1
            core.on_policy("default", version)

    successor = WholeCore(recipe(groups=2, max_staleness=2))
    state: list[tuple[str, Any]] = [("start", start) for start in starts]
    state += [("policy", version), ("batch", (batch, Frontier(decided.low_mark, decided.runs)))]
    for kind, value in data.draw(st.permutations(state)):
        if kind == "start":
            successor.on_started(value)
        elif kind == "policy":
            successor.on_policy("default", value)
        else:
            successor.on_batch("default", *value)
    for kind, value in log:
        if kind == "outcome":
            successor.on_outcome(*value)
        else:
            successor.on_group("default", value, oldest=None)
    for number, one in enumerate(submitted):
        successor.on_task(number, one)
    assert successor.room() == core.room()
    assert successor.live == core.live
    assert numbers(start_all(successor)) == numbers(start_all(core))


def test_a_task_that_its_episodes_could_not_carry_is_refused_without_its_bulk() -> None:
    core = WholeCore(recipe())
    core.on_task(0, task(0, payload=json.dumps({"text": "x" * MAX_TASK_CHARACTERS})))
    (start,) = core.next_start(1.0)
    assert start.verdict is not None
    assert start.verdict.code == "too_large"
    assert (start.submitted.task_id, start.submitted.samples) == ("0", 1)
    assert len(repr(start)) < 5_000


def test_what_evaluates_has_a_lane_and_a_limit_of_its_own() -> None:
    core = WholeCore(recipe(groups=1, max_staleness=0, evaluation_episodes=4))
    for number in range(4):
        core.on_task(number, task(number))
    for number in range(4, 8):
        core.on_task(number, task(number, purpose="evaluate"))
    assert start_all(core) == []  # there is no version yet
    core.on_policy("default", 0)
    starts = start_all(core)
    # Room for one group, and for two tasks of two samples, whoever came first.
    assert sorted(numbers(starts)) == [0, 4, 5]
    assert (core.room(), core.live, core.queued) == ({"default": 0}, 6, 5)
    for start in starts:
        if start.task == 4:
            core.on_outcome(start.task, start.sample)
    assert core.finished(4)
    assert not core.finished(5)
    assert numbers(start_all(core)) == [6]


def test_where_both_may_start_they_take_turns() -> None:
    core = WholeCore(recipe(groups=8, starts_per_s=2.0))
    core.on_policy("default", 0)
    for number in range(6):
        core.on_task(number, task(number, purpose="evaluate" if number % 3 else "train"))
    order = [numbers(start_all(core, now_s=10.0 + second))[0] for second in range(6)]
    assert order == [1, 0, 2, 3, 4, 5]


def test_what_evaluates_is_pinned_to_the_newest_version_when_it_starts() -> None:
    core = WholeCore(recipe())
    core.on_policy("default", 3)
    roles = {
        role: Use(policy="default", version=version, sampling=Sampling(max_tokens=8))
        for role, version in (("policy", None), ("critic", 1))
    }
    core.on_task(0, task(0, purpose="evaluate", roles=roles))
    core.on_task(1, task(1, roles={"policy": roles["policy"]}))
    versions = {
        (start.task, role): use.version
        for start in start_all(core)
        for role, use in start.submitted.roles.items()
    }
    assert versions == {(0, "policy"): 3, (0, "critic"): 1, (1, "policy"): None}


def test_what_evaluates_and_waits_is_cancelled_at_the_end_too() -> None:
    core = WholeCore(recipe())
    core.on_task(0, task(0, purpose="evaluate"))
    core.end()
    (start,) = start_all(core)
    assert start.verdict is not None
    assert (start.verdict.code, core.queued) == ("cancelled", 0)
