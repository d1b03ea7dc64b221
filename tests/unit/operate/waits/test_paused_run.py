"""A run without a process is paused, and nothing else is named as the cause."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.events import InstanceStateEntered, RunStateEntered
from headrace.services.operate.waits.run_facts import MemberCount
from headrace.services.operate.waits.wait_graph import Wait, build_waits, likely_cause
from tests.unit.operate.waits.stalled_runs import NOW, STALL_S, StalledRun

BEGAN = NOW - STALL_S


def record(run: StalledRun, service: str, state: str, at: float = BEGAN, **fields: Any) -> None:
    """Records the life of a service's only worker."""
    worker, every_ms = f"{service}-a-1", 60_000 if state == "ready" else 0
    values = {"instance": worker, "worker": worker, "service": service, "number": 0, **fields}
    run.add(
        InstanceStateEntered.model_validate(
            {"kind": "worker", "state": state, "every_ms": every_ms, **values}
        ),
        at,
    )


def paused() -> StalledRun:
    """A run with a batch, an episode and a task under way, whose processes have all ended."""
    run = StalledRun()
    run.batch("default", 2, BEGAN - 1)
    run.start(1, BEGAN - 1)
    run.task(2, BEGAN - 1)
    run.action("1/0/0/3", BEGAN - 1)
    run.env(NOW - 20)
    run.facts.members = {name: MemberCount(0, 1, BEGAN) for name in run.facts.members}
    for service in ("scheduler", "env", "trainer"):
        record(run, service, "gone")
    return run


def cause_of(run: StalledRun) -> Wait:
    cause = likely_cause(build_waits(run.facts, NOW))
    assert cause is not None
    return cause


def test_a_paused_run_is_the_only_cause() -> None:
    [wait] = build_waits(paused().facts, NOW)
    assert (wait.id, wait.kind, wait.since, wait.busy) == ("run", "run", BEGAN, False)
    assert wait.cause == "no process of this run runs, so it is paused"
    assert "`headrace run RECIPE` continues it" in wait.help


def test_killed_workers_are_gone_too() -> None:
    run = paused()
    record(run, "source", "ready", NOW - 76)
    record(run, "agent", "ready", NOW - 30)
    assert cause_of(run).id != "run"
    run.facts.ended_here = {"agent-a-1": NOW - 2}
    assert cause_of(run).id == "run"


def test_the_failure_that_no_worker_took_over_is_named() -> None:
    run = paused()
    record(run, "env", "failed", worker="env-a-0", reason="it was full")
    record(run, "agent", "failed", worker="agent-a-0", reason="an old one")
    record(run, "agent", "gone")
    assert cause_of(run).cause.endswith("paused; the last env failed: it was full")


@pytest.mark.parametrize("sign", ["life", "report", "member", "nothing heard"])
def test_a_run_with_one_live_process_is_not_paused(sign: str) -> None:
    run = paused()
    match sign:
        case "life":
            record(run, "source", "ready", NOW - 74)
        case "report":
            run.inference(NOW - 14)
        case "member":
            run.facts.members["agent"] = MemberCount(1, 0, NOW)
        case _:
            run.facts.workers.lives.clear()
    assert cause_of(run).id != "run"


def test_a_silent_broker_comes_before_the_pause() -> None:
    run = paused()
    run.facts.answered_at = BEGAN
    assert cause_of(run).id == "broker"


def test_a_run_that_has_ended_is_not_paused() -> None:
    run = paused()
    run.add(RunStateEntered(namespace="test", state="ended", digest=bytes(32)), NOW)
    assert build_waits(run.facts, NOW) == []


def test_a_trainer_that_ended_in_good_order_does_not_work() -> None:
    """The only policy's trainer names no policy."""
    run = paused()
    record(run, "env", "ready", NOW)
    found = {one.id: one for one in build_waits(run.facts, NOW)}
    assert not found["trainer/default"].busy
    assert found["trainer/default"].on == ("service/trainer/default",)
    assert found["service/trainer/default"].cause == "no trainer runs; the last one ended"
    assert found["service/trainer/default"].since == BEGAN
