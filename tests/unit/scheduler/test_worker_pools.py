"""Nothing starts for a policy or an environment of which no worker reports."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.events import EnvironmentLoad, LoadReported, PoolLoad
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.scheduler.worker_pools import WorkerPools

PARTITIONS = pack_i32([0])
SILENT_S = 3.0
"""A worker is suspected after so many seconds without a report."""


def pools(**scheduler: Any) -> WorkerPools:
    recipe = {
        "name": "test",
        "tasks": {"environment": "own"},
        "environments": {"own": {"use": "null"}, "theirs": {"use": "external"}},
        "scheduler": scheduler,
        "policies": {"default": {"model": "tiny-llama", "training": False}},
    }
    return WorkerPools(parse_recipe(recipe, "the test"))


def from_inference(worker: str = "inference", every_ms: int = 1000, **changes: Any) -> LoadReported:
    fields = {"slots": 1, "busy": 0, "waiting": 0, "run_ms": 0, **changes}
    load = PoolLoad(policy="default", partitions=PARTITIONS, **fields)
    return LoadReported(worker=worker, number=0, every_ms=every_ms, pools=(load,))


def from_env(**changes: Any) -> LoadReported:
    fields = {"slots": 1, "busy": 1, "waiting": 9, "run_ms": 0, "open_ms": 0, **changes}
    load = EnvironmentLoad(environment="own", partitions=PARTITIONS, **fields)
    return LoadReported(worker="env", number=0, every_ms=1000, pools=(), environments=(load,))


def test_an_environment_needs_an_env_worker_that_reports_and_may_be_busy() -> None:
    found = pools()
    found.on_report(from_inference(), 0.0)
    assert not found.take_more({"default"}, "own", 0.0)
    assert found.silent(0.0) == ["environments.own"]
    found.on_report(from_env(), 0.0)
    assert found.take_more({"default"}, "own", 0.0)
    assert found.silent(0.0) == []
    found.on_report(from_inference(), SILENT_S)
    assert not found.take_more({"default"}, "own", SILENT_S)


def test_an_env_worker_without_slots_or_partitions_runs_nothing() -> None:
    found = pools()
    found.on_report(from_inference(), 0.0)
    found.on_report(from_env(slots=0), 0.0)
    assert not found.take_more({"default"}, "own", 0.0)
    found.on_report(from_env().model_copy(update={"leaving": True}), 0.0)
    assert not found.take_more({"default"}, "own", 0.0)


@pytest.mark.parametrize("environment", [None, "theirs", "unknown"])
def test_what_no_env_worker_of_ours_runs_needs_no_report(environment: str | None) -> None:
    found = pools()
    assert found.silent(0.0) == ["policies.default", "environments.own"]
    found.on_report(from_inference(), 0.0)
    assert found.take_more({"default"}, environment, 0.0)


def test_a_recipe_may_do_without_reports() -> None:
    found = pools(require_reports=False)
    assert found.take_more({"default"}, "own", 0.0)
    assert found.silent(0.0) == []


def started(found: WorkerPools, now_s: float) -> int:
    """Starts one episode after the other, and returns how many."""
    episodes = 0
    while found.take_more({"default"}, None, now_s) and episodes < 1000:
        found.on_started({"default"}, 1)
        episodes += 1
    return episodes


@pytest.mark.parametrize("workers", [1, 10])
def test_what_started_counts_until_all_workers_have_reported(workers: int) -> None:
    found = pools(waiting_per_slot=4.0)

    def report(worker: int, now_s: float, **changes: Any) -> None:
        fields = {"slots": 20 // workers, **changes}
        found.on_report(from_inference(f"w{worker}", **fields), now_s)

    for worker in range(workers):
        report(worker, 0.0)
    bound = 20 + 4 * 20 + 1
    assert started(found, 0.0) == bound
    for worker in range(workers):
        at_s = 0.1 + worker / workers
        report(worker, at_s)
        assert started(found, at_s) == 0, "the other workers may have got the prompts"
    assert started(found, 1.24) == 0
    for worker in range(workers):
        report(worker, 1.25, busy=20 // workers, waiting=4 * 20 // workers)
    assert started(found, 1.25) == 1, "the reports have all of them now"
    for worker in range(workers):
        report(worker, 1.5)
    assert started(found, 1.5) == bound - 1


def test_the_slowest_reporter_decides_how_long_a_start_counts() -> None:
    found = pools(waiting_per_slot=1.0)
    found.on_report(from_inference("quick", slots=5), 0.0)
    found.on_report(from_inference("slow", slots=5, every_ms=3000), 0.0)
    assert started(found, 0.0) == 21
    found.on_report(from_inference("quick", slots=5), 2.0)
    assert started(found, 2.0) == 0
    assert started(found, 3.3) == 21


def test_a_clock_that_was_set_back_holds_up_nothing() -> None:
    found = pools(waiting_per_slot=1.0)
    found.on_report(from_inference(slots=5), 5000.0)
    assert started(found, 5000.0) == 11
    found.on_report(from_inference(slots=5), 1000.0)
    assert started(found, 1000.0) == 11


def test_a_successor_counts_what_the_workers_report() -> None:
    found = pools(waiting_per_slot=4.0)
    found.on_report(from_inference(slots=10, busy=10, waiting=39), 0.0)
    assert started(found, 0.0) == 2


@pytest.mark.parametrize(
    ("age_s", "is_first", "starts"),
    [(0.9, True, True), (SILENT_S, True, False), (-60.0, True, True), (0.9, False, False)],
    ids=["recent", "old", "of a clock ahead", "with live episodes"],
)
def test_reports_read_while_catching_up_count_if_they_are_recent_and_nothing_is_live(
    age_s: float, is_first: bool, starts: bool
) -> None:
    found, now_s = pools(), 100.0
    found.on_report(from_inference(), now_s, now_s - 2 * SILENT_S)
    found.on_report(from_inference(), now_s, now_s - age_s)
    found.on_report(from_env(), now_s, now_s - age_s)
    assert not found.take_more({"default"}, "own", now_s)
    found.on_begun(now_s, is_first=is_first)
    assert found.take_more({"default"}, "own", now_s) == starts


def test_a_report_counts_from_when_it_came() -> None:
    found = pools()
    found.on_report(from_inference(), 100.0, 98.0)
    found.on_begun(100.0, is_first=True)
    found.on_report(from_env(), 100.0)
    assert found.take_more({"default"}, "own", 100.9)
    found.on_report(from_env(), 101.0)
    assert "policies.default" in found.silent(98.0 + 10 * 1.0)
