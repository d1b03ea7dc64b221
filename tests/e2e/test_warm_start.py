"""A policy is shown what to do before it is rewarded, through the same topics."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.events import BatchAssembled, PolicyPublished
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.verify import check_namespace, read_all
from tests.e2e import harness

RECIPE = harness.RECIPES / "warm-start.toml"
TASKS, VERSIONS = 128, 32
"""What the recipe has demonstrated, and the versions that these make: 4 tasks a batch."""


@pytest.mark.long
def test_demonstrations_are_learned_before_anything_is_rewarded(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )

    async def main() -> None:
        async with harness.headrace(*harness.arguments_of(RECIPE, place)) as run:
            await run.says("running")
            topics = Topics(namespace, ("default",), 4)
            async with harness.watching(local_stack.bootstrap_servers, topics) as watch:
                # The source, while it submits or waits: its successor must do no more, no less.
                await watch.count("policies", VERSIONS // 2)
                harness.child_of(tmp_path, "source").kill()
                assert await run.ends(120.0) == 0, run.said
        report = await check_namespace(place)
        print(report)
        assert report.violations == []
        async with open_namespace(place, "test") as (log, _):
            deliveries, _ = await read_all(log)
        assert_learned(Facts.of(deliveries))

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)


def assert_learned(facts: Facts) -> None:
    shown = [one for one in facts.tasks.values() if one.event.agent == "teacher"]
    others = [one for one in facts.tasks.values() if one.event.agent == "default"]
    assert len(shown) == TASKS
    assert others
    versions = {one.event.version: one for one in facts.all(PolicyPublished)}
    learned_at = versions[VERSIONS].recorded_at
    assert min(one.recorded_at for one in others) >= learned_at
    surprise = [versions[number].event.metrics["cross_entropy"] for number in (1, VERSIONS)]
    assert surprise[1] < 0.3 < math.log(2) < surprise[0]
    rewards = {one.version: one.reward_mean for one in facts.events(BatchAssembled)}
    assert [number for number, mean in rewards.items() if mean is None] == [*range(1, VERSIONS + 1)]
    # By chance 1 episode in 70 crosses the lake.
    first = rewards[VERSIONS + 1]
    assert first is not None
    assert first > 0.3
