"""Ctrl-C at random moments: the same command continues the run, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.infra.local.detached import free_port
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness

RECIPE = harness.RECIPES / "frozen-lake.toml"
SETTINGS = ("--set", "stop.versions=120", "--set", "policies.default.training.checkpoint_every=4")
HEADRACE = (sys.executable, "-m", "headrace")
PAUSES = 20
LATEST_S = 25.0
"""Most seconds from its first line to Ctrl-C. The first training step takes about 15 s."""
RUN_S = 300.0


@pytest.mark.long
def test_a_run_that_is_paused_at_any_moment_continues(state: Path) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", random.randrange(10**6)))
    print(f"HEADRACE_SEED={seed}")
    moments = random.Random(seed)
    command = ("run", str(RECIPE), *SETTINGS, "--state", str(state))

    async def pause() -> None:
        async with harness.headrace(*command) as run:
            await run.says("starting", RUN_S)  # Before, Python itself starts.
            await asyncio.sleep(moments.uniform(0.0, LATEST_S))
            run.kill(signal.SIGINT)
            assert await run.ends(45) == 130, run.said

    for number in range(PAUSES):
        harness.run_bounded(pause(), RUN_S)
        print(f"pause {number}: all gone after {harness.gone(state):.1f} s")

    async def complete() -> None:
        async with harness.headrace(*command) as run:
            assert await run.ends(RUN_S) == 0, run.said

    harness.run_bounded(complete(), RUN_S + 30)
    stack = local.up(state, kafka_port=free_port(), registry_port=free_port())
    try:
        cluster = ClusterConfig(
            state, stack.bootstrap_servers, stack.registry_url, namespace="frozen-lake"
        )
        report = asyncio.run(check_namespace(cluster))
        print(report)
        assert report.violations == []
        assert report.tasks_ended == report.tasks > 0
        replayed = subprocess.run(
            [*HEADRACE, "replay", "batches", "--json", "--state", str(state)],
            capture_output=True, text=True, timeout=RUN_S, check=True,
        )  # fmt: skip
        rows = json.loads(replayed.stdout)["versions"]
        assert len(rows) > 120
        assert {(row["batch"], row["same"]) for row in rows} == {("same", True)}
    finally:
        local.down(state)
