"""The kit against real trainers: good ones pass, and each seeded fault fails by its name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "tests" / "integration" / "foreign_trainer.py"
ACCELERATE = ROOT / "examples" / "accelerate_trainer" / "trainer.py"
BOUND_S = 900.0


def try_trainer(stack: local.LocalStack, state: Path, limit_s: int, *command: str) -> Any:
    """The report of the kit about a trainer."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "headrace.conformance", "trainer", "--json"),
            *("--limit", str(limit_s), "--state", str(state)),
            *("--bootstrap-servers", stack.bootstrap_servers),
            *("--registry-url", stack.registry_url, "--", sys.executable, *command),
        ],
        capture_output=True, text=True, timeout=BOUND_S, cwd=ROOT,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1), done.stderr
    return report


def broken(report: Any) -> list[str]:
    return [one["rule"] for one in report["rules"] if one["verdict"] == "fail"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("none", None),
        ("wrong digest", "digests_are_right"),
        ("skipped version", "versions_in_order"),
        ("lost optimizer state", "keeps_its_state"),
        ("double publication", "each_version_once"),
        ("not fenced", "is_fenced"),
    ],
)
def test_a_seeded_fault_fails_by_its_name(
    local_stack: local.LocalStack, tmp_path: Path, fault: str, rule: str | None
) -> None:
    report = try_trainer(local_stack, tmp_path, 60, str(FOREIGN), fault)

    assert rule in broken(report) if rule else broken(report) == [], report


def learn_the_quickstart(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path, program: Path
) -> None:
    """A trainer's program joins a run, which reaches a mean reward of 0.95."""
    recipe = str(ACCELERATE.with_name("quickstart.toml"))
    headrace = (sys.executable, "-m", "headrace")
    address = {
        "HEADRACE_BOOTSTRAP_SERVERS": local_stack.bootstrap_servers,
        "HEADRACE_REGISTRY_URL": local_stack.registry_url,
        "HEADRACE_NAMESPACE": namespace,
        "HEADRACE_STATE": str(tmp_path / "state"),
    }
    variables = os.environ | address
    subprocess.run([*headrace, "apply", recipe], check=True, timeout=BOUND_S, env=variables)
    with (tmp_path / "output").open("wb") as output:
        trainer = subprocess.Popen(
            [sys.executable, program], cwd=tmp_path, env=variables, stdout=output, stderr=output
        )
        try:
            run = [*headrace, "run", recipe, "--quiet", "--check", "reward>=0.95"]
            subprocess.run(run, check=True, timeout=BOUND_S, env=variables)
            assert trainer.wait(BOUND_S) == 0, (tmp_path / "output").read_text()
        finally:
            trainer.kill()
            trainer.wait()


@pytest.mark.long
def test_the_trainer_on_accelerate_learns(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    learn_the_quickstart(local_stack, namespace, tmp_path, ACCELERATE)


@pytest.mark.long
def test_the_trainer_on_accelerate_keeps_the_contract(
    local_stack: local.LocalStack, tmp_path: Path
) -> None:
    report = try_trainer(local_stack, tmp_path, 120, str(ACCELERATE))

    assert {one["verdict"] for one in report["rules"]} == {"pass"}, report
