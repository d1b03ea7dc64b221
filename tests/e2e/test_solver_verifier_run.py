"""A solver and a verifier learn in one run, with several seeds: the shipped workflow as it is."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.commands import cluster_variables, run_command
from tests.e2e.harness import RECIPES
from tests.experiments.timeline import Point, reached, timeline

WORKFLOW = RECIPES.parents[2] / "examples" / "workflows" / "solver-verifier.toml"
SEEDS = range(int(os.environ.get("HEADRACE_SEEDS", "3")))
REWARD, VERSIONS = 0.9, 5
"""What the recipe stops at."""
RUN_S = 1_800.0
"""A bound for a busy machine: on such a one, runs took 292 to 604 s."""
LATER = 0.05
"""Versions that are published after the stop may be this much worse, by chance."""


def mean(points: list[Point]) -> float:
    return sum(point["reward"] for point in points) / len(points)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_both_policies_learn(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str, seed: int
) -> None:
    environment = {**os.environ, **cluster_variables(local_stack, namespace, tmp_path)}
    seeds = {"policies.solver": 2 * seed, "policies.verifier": 2 * seed + 1, "tasks": seed}
    words = (word for key, one in seeds.items() for word in ("--set", f"{key}.seed={one}"))
    command = ("run", str(WORKFLOW), "--json", "--quiet", *words)
    began = time.monotonic()
    done = run_command(command, environment, timeout_s=RUN_S)
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    assert (summary["failures"], summary["restarts"]) == (0, 0), summary
    assert re.fullmatch(rf"reward \S+ over {VERSIONS} versions", summary["reason"]), summary
    assert min(summary["rewards"].values()) >= REWARD, "not both at once, at the stop"
    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    points = timeline(ClusterConfig(tmp_path, servers, registry, namespace=namespace))
    load = os.getloadavg()[1]
    print(f"seed {seed}: {took_s:.0f} s with the start of all processes, load {load:.0f}")
    for policy, all_ in points.items():
        at = [reached(all_, REWARD, what, VERSIONS) for what in ("version", "seconds")]
        first, last = mean(all_[:VERSIONS]), mean(all_[-VERSIONS:])
        print(f"  {policy}: {first:.2f} to {last:.2f}; {REWARD} at version and second {at}")
        assert first < 0.65
        assert at[0] is not None
        assert last >= REWARD - LATER
