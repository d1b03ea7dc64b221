"""Ten stalls, each looked at after some seconds: the graph names the cause of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import (
    Dropped,
    EnvironmentUse,
    QuotaSet,
    RunStateEntered,
)
from headrace.services.operate.waits.heard_workers import LifeRecord
from headrace.services.operate.waits.run_facts import ActionDetail, MemberCount, SideProblem
from headrace.services.operate.waits.wait_graph import (
    Wait,
    build_waits,
    likely_cause,
    spell_s,
    wait_lines,
)
from tests.unit.operate.waits.stalled_runs import NOW, STALL_S, StalledRun

BEGAN = NOW - STALL_S


def graph(run: StalledRun) -> dict[str, Wait]:
    """The waits by id. Checks what holds for every graph."""
    waits = build_waits(run.facts, NOW)
    found = {one.id: one for one in waits}
    assert len(found) == len(waits)
    assert all(on in found for one in waits for on in one.on)
    roots = [not one.on for one in waits]
    assert roots == sorted(roots)
    assert all(one.cause for one in waits)
    return found


def cause_of(run: StalledRun) -> Wait:
    """The likely cause, which the text begins with."""
    waits = list(graph(run).values())
    cause = likely_cause(waits)
    assert cause is not None
    assert not cause.on
    assert cause.help
    lines = wait_lines(waits, NOW)
    assert cause.cause in lines[0]
    assert cause.help in lines[1]
    return cause


def playing(run: StalledRun) -> None:
    """Starts a task whose episodes have been reset, with workers that report."""
    run.start(1, BEGAN - 1)
    for sample in range(2):
        run.facts.on_answer(f"1/{sample}/0/1", BEGAN)
    run.inference(NOW)
    run.env(NOW)


def test_env_workers_are_dead() -> None:
    run = StalledRun()
    run.start(1, BEGAN - 1)
    run.env(BEGAN)
    run.inference(NOW)
    run.action("1/0/0/3", BEGAN)
    cause = cause_of(run)
    assert cause.id == "service/env"
    assert "env-a-2, reported 12 s ago" in cause.cause
    assert "headrace serve env" in cause.help
    found = graph(run)
    assert found["trainer/default"].on == ("batch/default",)
    assert found["batch/default"].on == ("group/1",)
    assert set(found["group/1"].on) == {"episode/1/0", "episode/1/1"}
    assert found["episode/1/0"].on == ("action/1/0/0/3",)
    assert found["action/1/0/0/3"].since == BEGAN


def test_a_judge_is_slow() -> None:
    run = StalledRun()
    playing(run)
    run.env(NOW, "default", "judge")
    run.action("1/0/0/9", BEGAN)
    run.facts.details["1/0/0/9"] = ActionDetail("judge", scores=True)
    run.facts.on_answer("1/1/0/9", NOW)
    cause = cause_of(run)
    assert "the judge judge has not scored for 12 s" in cause.cause
    assert "environments.judge.score_s" in cause.help


def test_a_disk_is_full() -> None:
    run = StalledRun()
    run.batch("default", 2, BEGAN)
    full = SideProblem("disk", "disk of the blob store", BEGAN, "the disk is full", "free space")
    run.facts.problems.append(full)
    assert cause_of(run).cause == "the disk is full"
    assert graph(run)["trainer/default"].on == ("service/disk/disk of the blob store",)


def test_a_filter_drops_everything() -> None:
    run = StalledRun()
    for number in range(8):
        run.start(number, BEGAN - 1)
        run.end(number, BEGAN)
        run.group(number, BEGAN, "zero_advantage")
    run.start(9, NOW - 1)
    cause = cause_of(run)
    assert cause.id == "batch/default"
    assert "all 8 groups, for 'zero_advantage'" in cause.cause
    assert "policies.default.groups.filters" in cause.help


def test_a_filter_empties_the_newest_batch() -> None:
    run = StalledRun()
    dropped = tuple(Dropped(task=number, reason="too_easy") for number in range(4))
    run.batch("default", 2, BEGAN, dropped=dropped, low_mark=4)
    run.publish("default", 2, BEGAN)
    assert "for 'too_easy'" in cause_of(run).cause


def test_the_broker_is_paused() -> None:
    run = StalledRun()
    playing(run)
    run.facts.answered_at = BEGAN
    cause = cause_of(run)
    assert cause.kind == "broker"
    assert cause.since == BEGAN


def test_weights_are_missing() -> None:
    run = StalledRun()
    playing(run)
    run.publish("default", 2, BEGAN)
    run.prompt("1/0/0/3", BEGAN)
    missing = SideProblem(
        "weights", "weights of default version 2", BEGAN, "the store lacks 1 blob", "put it back",
        "default",
    )  # fmt: skip
    run.facts.problems.append(missing)
    assert cause_of(run).cause == "the store lacks 1 blob"
    found = graph(run)
    assert "serves version 1 and can't load 2" in found["prompt/1/0/0/3"].cause


def test_an_engine_is_stuck() -> None:
    run = StalledRun()
    playing(run)
    run.inference(NOW, busy=2)
    run.prompt("1/0/0/3", BEGAN)
    run.prompt("1/1/0/3", BEGAN)
    cause = cause_of(run)
    assert cause.id == "worker/inference-a-1"
    assert "the engine may be stuck" in cause.cause


def test_a_worker_is_stopped() -> None:
    run = StalledRun()
    playing(run)
    run.inference(NOW - 5)
    run.prompt("1/0/0/3", BEGAN)
    cause = cause_of(run)
    assert cause.id == "service/inference/default"
    assert "reported" in cause.cause


def test_an_engine_has_not_completed_a_generation() -> None:
    run = StalledRun()
    run.start(1, BEGAN - 1)
    run.inference(NOW, run_ms=0)
    run.prompt("1/0/0/3", BEGAN)
    cause = cause_of(run)
    assert "has answered nothing for 12 s (no generation yet): it is slow or stuck" in cause.cause
    assert cause.busy  # It may be loading or compiling: no alarm yet.


@pytest.mark.parametrize("busy_s", [1.0, 4.0])
def test_a_slow_engine_is_no_alarm(busy_s: float) -> None:
    run = StalledRun()
    run.start(1, BEGAN - 1)
    run.inference(NOW, run_ms=int(1000 * busy_s) + 1_000)
    run.prompt("1/0/0/3", BEGAN)
    cause = cause_of(run)
    assert "answered nothing for 12 s" in cause.cause
    assert cause.busy


def test_the_disk_of_the_broker_stops_everything() -> None:
    run = StalledRun()
    playing(run)
    run.action("1/0/0/3", BEGAN)
    full = SideProblem("broker", "disk of the broker's folder", NOW - 2, "it is full", "free space")
    run.facts.problems = [full]
    assert cause_of(run).name == "disk of the broker's folder"


def test_a_trainer_was_killed_on_this_machine() -> None:
    run = StalledRun()
    run.batch("default", 2, BEGAN)
    life = LifeRecord("trainer", "default", "ready", "", NOW - 30, 60.0, "a", "trainer-a-4")
    run.facts.workers.lives["trainer-a-4"] = life
    assert graph(run)["trainer/default"].busy
    run.facts.ended_here = {"trainer-a-4": NOW - 2}
    cause = cause_of(run)
    assert cause.id == "service/trainer/default"
    assert "the process of the last one, trainer-a-4, has gone from this machine" in cause.cause
    assert cause.since == NOW - 2


@pytest.mark.parametrize("name", ["", "box:2"])
def test_an_image_is_full(name: str) -> None:
    """The image of the task counts, or else that of the recipe."""
    run = StalledRun(
        environments={"default": {"use": "null", "options": {"image": "box:2"}}},
        scheduler={"images": {"box:2": 2, "box:3": 9}},
    )
    playing(run)
    run.task(2, BEGAN, environment=EnvironmentUse(use="default", image=name))
    run.task(3, BEGAN, environment=EnvironmentUse(use="default", image="box:3"))
    found = graph(run)
    assert found["task/2"].cause == (
        "scheduler.images.box:2 allows 2 live episodes, and 2 are live"
    )
    assert found["task/2"].help == "headrace quota scheduler.images.box:2 --units NUMBER"
    assert found["task/2"].on == ("group/1",)
    assert "images" not in found["task/3"].cause


def test_a_quota_is_0() -> None:
    run = StalledRun()
    run.inference(NOW)
    run.task(1, BEGAN, tenant="search")
    run.task(2, BEGAN, tenant="search")
    run.add(QuotaSet(tenant="search", set_at=0, live_episodes=0), BEGAN)
    cause = cause_of(run)
    assert cause.name == "task 1 and 1 more"
    assert "the quota of tenant 'search' is 0 live episodes" in cause.cause
    assert cause.help.startswith("`headrace quota search --live-episodes")
    assert graph(run)["batch/default"].on == ("task/1",)


def test_the_version_barrier_holds_a_policy() -> None:
    one: dict[str, Any] = {"model": "tiny-llama", "batches": {"groups": 4}}
    run = StalledRun(
        policies={"fast": one, "slow": one},
        barrier={"versions": 1},
        tasks={"samples": 2, "roles": {"a": "fast", "b": "slow"}},
    )
    run.publish("fast", 2, BEGAN)
    run.batch("fast", 2, BEGAN - 1)
    found = graph(run)
    assert found["batch/fast"].on == ("trainer/slow",)
    assert "version barrier" in found["batch/fast"].cause
    assert found["trainer/slow"].on == ("batch/slow",)


def test_a_policy_that_the_barrier_holds_needs_no_room() -> None:
    """The scheduler starts tasks nevertheless, so something else stops them."""
    one: dict[str, Any] = {"model": "tiny-llama", "batches": {"groups": 4, "max_staleness": 0}}
    run = StalledRun(
        policies={"fast": one, "slow": one},
        barrier={"versions": 1},
        tasks={"samples": 2, "roles": {"a": "fast", "b": "slow"}},
        scheduler={"live_episodes": 2, "require_reports": False},
    )
    run.publish("fast", 2, BEGAN)
    run.batch("fast", 2, BEGAN - 1)
    run.start(99, BEGAN)
    for number in range(4):
        run.facts.policies["fast"].on_start(number)
    assert run.facts.policies["fast"].room is not None
    assert run.facts.policies["fast"].room.room <= 0
    run.task(200, BEGAN)
    assert "scheduler.live_episodes allows 2" in graph(run)["task/200"].cause


def test_a_permission_is_missing() -> None:
    run = StalledRun()
    playing(run)
    run.facts.members["agent"] = MemberCount(0, 2, BEGAN)
    run.facts.errors["agent"] = "can't write to test.actions.v1: TOPIC_AUTHORIZATION_FAILED"
    run.facts.workers.lives["agent-a-3"] = LifeRecord(
        "agent", "", "failed", "it failed", BEGAN, 0.0
    )
    cause = cause_of(run)
    assert cause.id == "service/agent"
    assert "TOPIC_AUTHORIZATION_FAILED" in cause.cause
    assert "it failed" in cause.cause


def test_a_run_that_has_ended_waits_for_nothing() -> None:
    run = StalledRun()
    run.add(RunStateEntered(namespace="test", state="ended", digest=bytes(32)), NOW)
    assert build_waits(run.facts, NOW) == []
    assert wait_lines([], NOW) == ["Nothing waits."]


def test_no_scheduler_runs() -> None:
    run = StalledRun()
    run.inference(NOW)
    run.task(1, BEGAN)
    run.facts.members["scheduler"] = MemberCount(0, 1, BEGAN)
    assert cause_of(run).id == "service/scheduler"


def test_no_inference_worker_reports() -> None:
    run = StalledRun()
    run.task(1, BEGAN)
    cause = cause_of(run)
    assert cause.id == "service/inference/default"
    assert "no inference worker runs" in cause.cause


def test_live_episodes_are_the_limit() -> None:
    run = StalledRun(scheduler={"live_episodes": 2})
    playing(run)
    run.task(2, BEGAN)
    found = graph(run)
    assert "scheduler.live_episodes allows 2" in found["task/2"].cause
    assert found["task/2"].on == ("group/1",)


def test_a_started_task_does_not_wait_in_any_order() -> None:
    run = StalledRun()
    run.start(1, BEGAN)
    run.task(1, BEGAN)
    assert not run.facts.tasks


def test_an_answer_may_be_read_before_its_request_and_its_start() -> None:
    run = StalledRun()
    run.facts.on_answer("1/0/0/3", BEGAN)
    run.prompt("1/0/0/3", BEGAN)
    run.start(1, BEGAN)
    assert not run.facts.episodes[1, 0].requests


def test_an_older_attempt_asks_for_nothing_any_more() -> None:
    run = StalledRun()
    run.start(1, BEGAN)
    run.action("1/0/0/3", BEGAN)
    run.action("1/0/1/1", BEGAN)
    run.action("1/0/0/5", BEGAN)
    run.action("1/0/1/1.close", BEGAN)
    assert list(run.facts.episodes[1, 0].requests) == ["1/0/1/1"]


@pytest.mark.parametrize(
    "identity", ["", "a/b/c/d", "1/2/3", "1/2/-3/4", "\u0663/1/0/1x" * 3, "1" * 5_000 + "/2/0/1"]
)
def test_ids_of_other_programs_are_left_out(identity: str) -> None:
    run = StalledRun()
    run.facts.on_answer(identity, BEGAN)
    assert (1, 2) not in run.facts.episodes


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (59.9, "59 s"), (61, "1 min 1 s"),
                                               (7_260, "2 h 1 min")])  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert spell_s(seconds) == text


@st.composite
def histories(draw: st.DrawFn) -> StalledRun:
    """A run in which anything may have happened, in any order."""
    run = StalledRun()
    times = st.floats(NOW - 50, NOW)
    for kind, task, at in draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), times), max_size=40)
    ):
        acts: list[Callable[[], object]] = [
            partial(run.task, task, at),
            partial(run.start, task, at),
            partial(run.end, task, at),
            partial(run.group, task, at),
            partial(run.group, task, at, "too_easy"),
            partial(run.prompt, f"{task}/0/0/3", at),
            partial(run.action, f"{task}/1/0/1", at),
            partial(run.facts.on_answer, f"{task}/0/0/3", at),
            partial(run.inference, at, version=task - 1),
            partial(run.env, at),
        ]
        acts[kind]()
    return run


@given(histories())
def test_every_graph_is_closed_and_says_why(run: StalledRun) -> None:
    found = graph(run)
    for one in found.values():
        assert set(asdict(one)) == {"id", "kind", "name", "since", "on", "cause", "help", "busy"}
    ended = {key for key in run.facts.ended}
    assert not [one for one in found if any(one == f"episode/{t}/{s}" for t, s in ended)]
    assert wait_lines(list(found.values()), NOW)


def test_no_env_worker_reports() -> None:
    run = StalledRun(environments={"default": {"use": "null"}})
    run.inference(NOW)
    run.task(1, BEGAN)
    cause = cause_of(run)
    assert cause.id == "service/env"
    assert "no env worker runs" in cause.cause
    run.env(NOW)
    assert "service/env" not in graph(run)


def test_an_environment_of_another_team_needs_no_report() -> None:
    run = StalledRun(environments={"default": {"use": "external"}})
    run.inference(NOW)
    run.task(1, BEGAN)
    assert "service/env" not in graph(run)
