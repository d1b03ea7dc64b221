"""The workflows in `examples/workflows`: what their environments give, and runs through a Kafka."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples.workflows.solver_verifier import RIGHT, WRONG, Sums, sums
from headrace.infra import local
from headrace.services.base.types import TaskView
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.checker import check_namespace
from tests.commands import cluster_variables, run_command

SOLVER_VERIFIER = "examples/workflows/solver-verifier.toml"
LEARN_S = 1200.0
"""A bound for a busy machine; on a quiet one a run takes some minutes."""


@pytest.mark.parametrize("verdict", [RIGHT, WRONG])
@pytest.mark.parametrize("said", ["3", "1"])
def test_neither_policy_sets_the_others_reward_alone(said: str, verdict: str) -> None:
    async def play(sample: int) -> tuple[str, Mapping[str, float]]:
        environment = Sums(largest=2)
        await environment.reset(TaskView(0, sample, {"question": "1+2", "answer": "3"}, {}, 7))
        shown = (await environment.step(said)).text
        return shown, (await environment.step(verdict)).rewards

    played = [asyncio.run(play(sample)) for sample in range(200)]
    right = sum(shown == "3" for shown, _ in played)
    assert 70 < right < 130, "an answer that is shown is right in half of the episodes"
    for shown, rewards in played:
        verified = verdict == (RIGHT if shown == "3" else WRONG)
        assert rewards["verifier"] == verified
        assert rewards["solver"] == (said == "3") * (0.5 + 0.5 * verified)
    assert len({one.item_id for one in sums(largest=2)}) == 9


def test_each_policy_is_trained_on_its_own_reward(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = cluster_variables(local_stack, namespace, tmp_path)
    sets = [f"policies.{name}.batches.groups=2" for name in ("solver", "verifier")]
    sets += ["stop.versions=3", "stop.reward=9", "tasks.samples=4", "barrier.versions=1"]
    command = ["run", SOLVER_VERIFIER, "--json", "--quiet"]
    done = run_command((*command, *(w for one in sets for w in ("--set", one))), environment)
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert (summary["failures"], summary["restarts"]) == (0, 0), summary

    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    cluster = ClusterConfig(tmp_path, servers, registry, namespace=namespace)
    report = asyncio.run(check_namespace(cluster))
    assert report.violations == []
    assert min(report.versions["solver"], report.versions["verifier"]) >= 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_the_solver_and_the_verifier_both_learn(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str, seed: int
) -> None:
    sets = [f"policies.solver.seed={seed}", f"policies.verifier.seed={seed + 100}"]
    sets += [f"tasks.seed={seed}"]
    command = ["run", SOLVER_VERIFIER, "--quiet", "--check", "reward>=0.85"]
    words = (*command, *(word for one in sets for word in ("--set", one)))
    done = run_command(
        words, cluster_variables(local_stack, namespace, tmp_path), timeout_s=LEARN_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
