"""What is known of a run stays bounded and right in a run of weeks."""

from __future__ import annotations

import pytest

from headrace.schemas.events import InstanceStateEntered, LoadReported
from headrace.services.operate.waits import run_facts
from headrace.services.operate.waits.heard_workers import HeardWorkers
from headrace.services.operate.waits.wait_graph import build_waits
from tests.unit.operate.waits.stalled_runs import NOW, STALL_S, StalledRun

BEGAN = NOW - STALL_S


def test_late_answers_do_not_hide_the_episodes_that_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers to requests that an ended episode has given up may be read without its end."""
    monkeypatch.setattr(run_facts, "MOST_EPISODES", 10)
    monkeypatch.setattr(run_facts, "MOST_EARLY", 10)
    run = StalledRun()
    for number in range(100, 150):
        run.facts.on_answer(f"{number}/0/0/3", BEGAN)
    run.start(1, BEGAN)
    run.action("1/0/0/3", BEGAN)
    assert list(run.facts.episodes) == [(1, 0), (1, 1)]
    assert run.facts.more_episodes == 0
    assert "action/1/0/0/3" in {one.id for one in build_waits(run.facts, NOW)}
    for number in range(2, 8):
        run.start(number, BEGAN)
    assert (len(run.facts.episodes), run.facts.more_episodes) == (10, 4)


def test_workers_that_come_after_many_others_are_heard() -> None:
    workers = HeardWorkers({"default"}, most=10)
    for number in range(30):
        for name in ("inference-first", f"inference-{number}"):
            report = LoadReported(worker=name, number=number, every_ms=1000, pools=())
            workers.on_report(report, float(number))
    assert len(workers.newest) == len(workers.first) == 10
    assert workers.newest["inference-29"] == (29.0, False)
    assert workers.first["inference-first"] == 0.0


def test_a_trainer_that_starts_after_many_other_workers_is_known() -> None:
    workers = HeardWorkers({"default"}, most=10)
    for number in range(20):
        worker = f"env-a-{number}"
        workers.on_life(
            InstanceStateEntered(
                instance=worker,
                kind="worker",
                worker=worker,
                service="env",
                state="gone",
                number=number,
            ),
            BEGAN - 100 + number,
        )
    workers.on_life(
        InstanceStateEntered(
            instance="trainer-b-9", kind="worker", worker="trainer-b-9", service="trainer",
            policy="default", state="ready", every_ms=60_000, number=0,
        ),
        NOW - 1,
    )  # fmt: skip
    assert len(workers.lives) == 10
    assert workers.lives["trainer-b-9"].state == "ready"
