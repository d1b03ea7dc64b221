"""A real Prometheus scrapes a whole run, and loads and answers what the dashboards ask."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.run.children import child_specs
from tests import debian
from tests.commands import cluster_variables
from tests.integration import prometheus as programs
from tests.unit.operate.dashboards.test_dashboards import FOLDER, panels, rules
from tests.unit.test_architecture import ROOT

RUN_S = 240.0
DOWN_S = 30.0
"""Seconds until scrapes, one each second, must have seen that a process has ended."""
RECIPE = ROOT / "tests/e2e/recipes/frozen-lake.toml"
VERSIONS = 3
SELDOM = frozenset({"headrace_dead_letters_total", "headrace_weight_loads_total"})
"""Counters with labels that appear once something goes wrong."""
OF_SANDBOXES = frozenset({"headrace_image_pulls_total", "headrace_sandbox_host_up"})


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := debian.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers use one
        folder = folder.parent
    return debian.unpacked(["prometheus"], folder / "prometheus")


def consecutive_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(21_000, 29_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    free = stack.enter_context(socket.socket())
                    free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports in a row")


@pytest.mark.long
def test_a_run_answers_every_panel_and_rule(
    tmp_path: Path, unpacked: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    specs = child_specs(read_recipe(str(RECIPE), ()), RECIPE, 1)
    first = consecutive_ports(len(specs) + 1)
    targets = [f"127.0.0.1:{first + 1 + number}" for number in range(len(specs))]
    environment = {
        **os.environ,
        **cluster_variables(local_stack, namespace),
        "HEADRACE_STATE": str(tmp_path / "state"),
    }
    command = ("run", str(RECIPE), "--set", f"stop.versions={VERSIONS}", "--no-check", "--quiet")
    rule_file = FOLDER / "alerts.yml"
    with programs.running(unpacked, tmp_path, first, targets, rule_file) as prometheus:
        subprocess.run(
            [sys.executable, "-m", "headrace", *command, "--metrics-port", str(first + 1)],
            env=environment, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        last = "last_over_time({}[10m])".format
        services = prometheus.query(last("headrace_service_info"))
        assert {one["metric"]["service"] for one in services} == {
            *("trainer", "inference", "agent", "env", "assemble-groups", "assemble-batches"),
            *("item-statistics", "scheduler", "source"),
        }
        assert {one["metric"]["namespace"] for one in services} == {namespace}
        (version,) = prometheus.query(f"max({last('headrace_policy_version')})")
        assert float(version["value"][1]) >= 1
        (phases,) = prometheus.query(f"count({last('headrace_trainer_seconds_total')})")
        assert float(phases["value"][1]) == 3
        loaded = prometheus.get("rules")["groups"][0]["rules"]
        assert [one["name"] for one in loaded] == list(rules())
        assert {one["health"] for one in loaded} == {"ok"}
        missing = []
        for title, expressions in panels().items():
            for expression in expressions:
                prometheus.query(expression)
                missing += missing_series(prometheus, title, expression)
        assert missing == []
        # The processes have ended with the run, and the rule for that sees it at the next scrapes.
        down: set[str] = set()
        until = time.monotonic() + DOWN_S
        while down != set(targets) and time.monotonic() < until:
            time.sleep(0.5)
            found = prometheus.query(rules()["HeadraceServiceDown"])
            down = {one["metric"]["instance"] for one in found}
        assert down == set(targets)


def missing_series(prometheus: programs.Prometheus, title: str, expression: str) -> list[str]:
    """The metrics of an expression that the run has not exported."""
    names = set(re.findall(r"\bheadrace_\w+", expression)) - SELDOM - OF_SANDBOXES
    return [
        f"{title}: {name}"
        for name in sorted(names)
        if not prometheus.query(f"last_over_time({name}[10m])")
    ]


def series(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in pairs]


FIRING: dict[str, list[dict[str, str]]] = {
    "HeadraceServiceDown": series(('up{job="headrace",instance="a"}', "0x90")),
    "HeadraceNoNewVersion": series(
        ('headrace_policy_version{policy="p",instance="a"}', "7x90"),
        ('headrace_trainer_seconds_total{policy="p",instance="a",phase="wait"}', "0+60x90"),
    ),
    "HeadraceTrainerWaits": series(
        ('headrace_trainer_seconds_total{policy="p",phase="wait"}', "0+54x90"),
        ('headrace_trainer_seconds_total{policy="p",phase="train"}', "0+6x90"),
    ),
    "HeadraceBatchesSkipped": series(
        ('headrace_versions_published_total{policy="p",status="skipped"}', "0x60 1x30")
    ),
    "HeadraceLowAcceptRate": series(
        ('headrace_batched_samples_total{policy="p",result="accepted"}', "0+1x90"),
        ('headrace_batched_samples_total{policy="p",result="dropped"}', "0+9x90"),
    ),
    "HeadraceOldVersionServed": series(
        ('headrace_policy_version{policy="p",instance="t"}', "9x90"),
        ('headrace_policy_version_served{policy="p",instance="a"}', "5x90"),
        ('headrace_policy_version_served{policy="p",instance="b"}', "9x90"),
    ),
    "HeadraceWeightsNotLoaded": series(
        ('headrace_weight_loads_total{policy="p",result="failed"}', "0+1x90")
    ),
    "HeadracePromptsWait": series(
        ('headrace_generation_queue_seconds_bucket{policy="p",le="30.0"}', "0+1x90"),
        ('headrace_generation_queue_seconds_bucket{policy="p",le="100.0"}', "0+9x90"),
        ('headrace_generation_queue_seconds_bucket{policy="p",le="+Inf"}', "0+9x90"),
    ),
    "HeadraceTasksDoNotStart": series(
        ("headrace_tasks_queued", "5x90"), ("headrace_episodes_started", "0x90")
    ),
    "HeadraceEpisodesFail": series(
        ('headrace_episodes_ended_total{ending="failed"}', "0+3x90"),
        ('headrace_episodes_ended_total{ending="finished"}', "0+7x90"),
    ),
    "HeadraceLagGrows": series(('headrace_lag_records{instance="a",topic="t"}', "10000+1000x90")),
    "HeadraceDeadLetters": series(('headrace_dead_letters_total{topic="t"}', "0x60 1x30")),
    "HeadraceImagePullsFail": series(('headrace_image_pulls_total{result="failed"}', "0+1x90")),
    "HeadraceSandboxHostDown": series(('headrace_sandbox_host_up{host="h"}', "0x90")),
}
"""What makes each alert fire, as series of one value a minute."""

HEALTHY = series(
    ('up{job="headrace",instance="a"}', "1x90"),
    ('headrace_policy_version{policy="p",instance="a"}', "0+1x90"),
    ('headrace_policy_version{policy="untrained",instance="b"}', "0x90"),
    ('headrace_trainer_seconds_total{policy="p",instance="a",phase="wait"}', "0+30x90"),
    ('headrace_trainer_seconds_total{policy="p",instance="a",phase="train"}', "0+30x90"),
    ('headrace_versions_published_total{policy="p",status="trained"}', "0+1x90"),
    ('headrace_batched_samples_total{policy="p",result="accepted"}', "0+9x90"),
    ('headrace_batched_samples_total{policy="p",result="dropped"}', "0+1x90"),
    ('headrace_policy_version_served{policy="p",instance="a"}', "0+1x90"),
    ('headrace_generation_queue_seconds_bucket{policy="p",le="30.0"}', "0+9x90"),
    ('headrace_generation_queue_seconds_bucket{policy="p",le="+Inf"}', "0+9x90"),
    ("headrace_tasks_queued", "5x90"),
    ("headrace_episodes_started", "9x90"),
    ('headrace_episodes_ended_total{ending="failed"}', "0+1x90"),
    ('headrace_episodes_ended_total{ending="finished"}', "0+9x90"),
    ('headrace_lag_records{instance="a",topic="t"}', "20000-100x90"),
    ('headrace_dead_letters_total{topic="t"}', "3x90"),
    ('headrace_sandbox_host_up{host="h"}', "1x90"),
)
"""A run to which nothing happens."""


def test_each_alert_fires_for_its_cause_and_none_for_a_healthy_run(
    tmp_path: Path, unpacked: Path
) -> None:
    assert list(FIRING) == list(rules())
    at = "exp_alerts"
    # promtool compares whole alerts, labels included, so it counts those that fire instead.
    cases: list[dict[str, Any]] = [
        {
            "interval": "1m",
            "input_series": FIRING[name],
            "promql_expr_test": [fires(name, 1)],
        }
        for name in FIRING
    ]
    cases.append(
        {
            "interval": "1m",
            "input_series": HEALTHY,
            "alert_rule_test": [
                {"eval_time": f"{minute}m", "alertname": name, at: []}
                for name in FIRING
                for minute in (45, 85)
            ],
        }
    )
    file = tmp_path / "cases.json"
    rule_files = [str(FOLDER / "alerts.yml")]
    file.write_text(json.dumps({"rule_files": rule_files, "tests": cases}))
    promtool = str(unpacked / "usr/bin/promtool")
    for command in (
        ("check", "rules", str(FOLDER / "alerts.yml")),
        ("check", "config", str(FOLDER / "prometheus.yml")),
        ("test", "rules", str(file)),
    ):
        done = subprocess.run(
            [promtool, *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def fires(name: str, count: int) -> dict[str, Any]:
    """A test of promtool: so many alerts of this name fire after 85 minutes."""
    return {
        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
        "eval_time": "85m",
        "exp_samples": [{"labels": "{}", "value": count}],
    }
