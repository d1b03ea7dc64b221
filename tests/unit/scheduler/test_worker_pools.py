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


def from_inference() -> LoadReported:
    load = PoolLoad(policy="default", partitions=PARTITIONS, slots=1, busy=0, waiting=0, run_ms=0)
    return LoadReported(worker="inference", number=0, every_ms=1000, pools=(load,))


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
