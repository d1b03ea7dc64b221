"""A run evaluates its versions as it learns; `headrace evaluate` measures one afterwards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from headrace.infra import local
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.verify.verify import check_namespace
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace

ITEMS, SAMPLES = 3, 4
EVALUATION = {"every": 2, "items": ITEMS, "samples": SAMPLES}
SETTINGS = (
    *("--set", "stop.versions=4", "--set", "stop.reward=9"),
    *("--set", f"evaluation={json.dumps(EVALUATION)}"),
)


def test_versions_are_evaluated_in_the_run_and_after_it(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**cluster_variables(local_stack, namespace, tmp_path), "TMPDIR": str(scratch)}
    summary = json.loads(headrace(("run", "quickstart", *SETTINGS, "--json"), environment))
    measured = summary["evaluations"]["default"]
    assert measured.keys() <= {"0", "2", "4"}
    whole = {"items": ITEMS, "samples": SAMPLES, "failed": 0}
    assert {name: measured["0"][name] for name in whole} == whole
    place = ClusterConfig(tmp_path, servers, registry, namespace=namespace)
    assert asyncio.run(check_namespace(place)).violations == []

    told = headrace(
        ("evaluate", "quickstart", *SETTINGS, "--version", "2", "--quiet", "--json"), environment
    )
    evaluation = json.loads(told)["default"]
    assert {name: evaluation[name] for name in whole} == whole
    assert evaluation["pass"].keys() == {"1", "2", "4"}
    assert list(scratch.glob("headrace-*")) == []  # torch has a cache there
