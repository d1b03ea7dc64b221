"""Batches replay groups while batch assembly and trainer are killed: the log can't tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.events import BatchAssembled
from headrace.schemas.topics import BATCHES, Topics
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.replay.recording import read_topic
from headrace.services.operate.verify.verify import check_namespace
from tests.commands import cluster_variables
from tests.e2e import harness

RUN_S = 240.0
VERSIONS = 14
SETTINGS = (
    f"stop.versions={VERSIONS}",
    "tasks.samples=8",
    "policies.default.batches.groups=4",
    'policies.default.batches.replay={"share": 0.25, "max_age": 8, "weight": 0.5}',
    'policies.default.groups.select={"use": "best_of", "samples": 4}',
    "policies.default.training.checkpoint_every=3",
)


@pytest.mark.long
def test_replays_survive_the_death_of_batch_assembly_and_trainer(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    cluster = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )

    batches: list[BatchAssembled] = []

    async def record() -> None:
        arguments = [part for setting in SETTINGS for part in ("--set", setting)]
        arguments += ["--state", str(tmp_path), "--namespace", namespace]
        arguments += ["--bootstrap-servers", local_stack.bootstrap_servers]
        arguments += ["--registry-url", local_stack.registry_url]
        async with harness.headrace("run", "quickstart", *arguments) as run:
            await run.says("running", RUN_S)
            topics = Topics(namespace, ("default",), 4)
            async with harness.watching(local_stack.bootstrap_servers, topics) as watch:
                await watch.count("policies", 4, RUN_S)
                for service in ("assemble-batches", "trainer"):
                    harness.kill(harness.child_of(tmp_path, service).pid)
                    await watch.more("policies", 3)
                assert await run.ends(RUN_S) == 0, run.said
        report = await check_namespace(cluster)
        assert report.violations == []
        async with open_namespace(cluster, "test") as (log, _):
            batches.extend([one.event async for one in read_topic(log, BATCHES, "default")])

    try:
        harness.run_bounded(record(), 2 * RUN_S)
    finally:
        harness.end_all_of(tmp_path)
    later = [one for batch in batches[4:VERSIONS] for one in batch.samples]
    replayed = [one for one in later if one.use]
    assert len(replayed) == len(later) / 4
    assert {(one.use, one.weight) for one in replayed} == {(1, 0.5)}
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "replay", "batches", "--json"],
        env={**os.environ, **cluster_variables(local_stack, namespace, tmp_path)},
        capture_output=True, text=True, timeout=RUN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout)["versions"]
    assert len(versions) > VERSIONS
    assert {one["batch"] for one in versions} == {"same"}
    assert all(one["same"] for one in versions), "weights are equal, too"
