"""Processes of a trainer with two ranks are killed and stopped, and the run learns all the same."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from headrace.infra import local
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness

TIMEOUT_S = 30.0
RUN_S = 900.0
CHANGES = (
    "policies.default.training.processes=2",
    f"policies.default.training.rank_timeout_s={TIMEOUT_S}",
    "policies.default.training.checkpoint_every=5",
    "stop.reward_versions=6",
)
TRAINING = tuple(part for change in CHANGES for part in ("--set", change))


def ranks_of(state: Path) -> tuple[psutil.Process, psutil.Process]:
    """The trainer and its rank 1. Between them is rank 1's guard."""
    trainer = harness.child_of(state, "trainer")
    [follower] = [
        one
        for one in trainer.children(recursive=True)
        if one.cmdline()[1:3] == ["-m", "headrace.trainer.ranks.rank_process"]
    ]
    return trainer, follower


@pytest.mark.long
def test_each_rank_is_killed_and_one_stops_and_the_run_learns(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe("quickstart", CHANGES)

    async def main() -> None:
        arguments = (
            *("run", "quickstart", "--check", "reward>=0.95", "--check", "failures==0"),
            *("--check", "restarts==3", *TRAINING),
            *("--state", str(tmp_path), "--namespace", namespace),
            *("--bootstrap-servers", local_stack.bootstrap_servers),
            *("--registry-url", local_stack.registry_url),
        )
        topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
        async with harness.headrace(*arguments) as run:
            await run.says("running")
            async with harness.watching(local_stack.bootstrap_servers, topics) as watch:
                await watch.count("policies", 3)
                for victim, number in ((1, "SIGKILL"), (0, "SIGKILL"), (1, "SIGSTOP")):
                    began = time.time()
                    ranks_of(tmp_path)[victim].send_signal(signal.Signals[number])
                    # The trainer may have had one version more under way.
                    await watch.more("policies", 4)
                    print(f"rank {victim} {number:<8} 4 versions {time.time() - began:5.1f} s")
                assert await run.ends(RUN_S) == 0, run.said
        report = await check_namespace(place)
        print(report)
        assert report.violations == []
        assert report.tasks_ended == report.tasks > 0
        assert report.episodes_ended == report.episodes > 0

    try:
        harness.run_bounded(main(), limit_s=2 * RUN_S)
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
