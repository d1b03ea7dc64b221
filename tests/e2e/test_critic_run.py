"""PPO with a critic learns through Kafka, and its values survive a trainer that is killed."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean

import pytest

from headrace.infra import local
from headrace.schemas.events import BatchAssembled, PolicyPublished
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.verify import check_namespace, read_all
from tests.bench.learning import ALGORITHMS
from tests.e2e import harness

RECIPE = "frozen-lake-maps"
REWARD = 0.6
"""What the lockstep loop reaches within 60 to 80 versions."""
CHANGES = (
    *ALGORITHMS["ppo"],
    # So the first version of the trainer's successor is made with what the checkpoint has.
    "policies.default.training.checkpoint_every=1",
    f"stop.reward={REWARD}",
    "stop.reward_versions=10",
    "stop.versions=110",
)
KILLED_AT = 40
"""The versions before the kill. By then the lockstep loop has a mean reward of 0.4."""
STEP = 20
AROUND = 5
"""The values of one batch of 128 episodes differ by 0.2 from the next one's."""
GONE_S = 10.0
"""A bound for the end of a process that was killed."""
RUN_S = 1_200.0
"""A bound for a busy machine; on a quiet one the run takes some minutes."""


@pytest.mark.long
def test_a_critic_learns_through_kafka_and_comes_back_from_its_checkpoint(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe(RECIPE, CHANGES)

    async def main() -> None:
        run_it = harness.arguments_of(Path(RECIPE), place)
        changed = [word for change in CHANGES for word in ("--set", change)]
        checks = ("--check", f"reward>={REWARD}", "--check", "restarts==1")
        topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
        began = time.time()
        async with harness.headrace(*run_it, *changed, *checks) as run:
            await run.says("running")
            async with harness.watching(local_stack.bootstrap_servers, topics) as watch:
                await watch.count("policies", 1 + KILLED_AT, RUN_S)
                trainer = harness.child_of(tmp_path, "trainer")
                trainer.kill()
                trainer.wait(GONE_S)
                # What is recorded later is its successor's, which needs seconds to start.
                killed = time.time()
            assert await run.ends(RUN_S) == 0, run.said
        print(f"the run took {time.time() - began:.0f} s")
        report = await check_namespace(place)
        print(report)
        assert report.violations == []
        async with open_namespace(place, "test") as (log, _):
            deliveries, _ = await read_all(log)
        assert_learned(Facts.of(deliveries), killed)

    try:
        harness.run_bounded(main(), limit_s=2 * RUN_S)
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)


def assert_learned(facts: Facts, killed: float) -> None:
    rewards = [one.reward_mean or 0.0 for one in facts.events(BatchAssembled)]
    steps = [fmean(rewards[first : first + STEP]) for first in range(0, len(rewards), STEP)]
    print(f"mean rewards of {STEP} versions: {[round(one, 2) for one in steps]}")
    assert fmean(rewards[:5]) < 0.2
    versions = facts.in_order(PolicyPublished)
    before = [one.event for one in versions if one.recorded_at <= killed][-AROUND:]
    later = [one.event for one in versions if one.recorded_at > killed]
    after = [one for one in later if one.version > before[-1].version][:AROUND]
    for one in (*before, *after):
        values = {name: round(one.metrics[name], 2) for name in ("value_mean", "return_mean")}
        print(f"version {one.version}: {values}")
    for some in (before, after):
        assert len(some) == AROUND
        returns = fmean(one.metrics["return_mean"] for one in some)
        assert returns > 0.3
        assert fmean(one.metrics["value_mean"] for one in some) == pytest.approx(returns, abs=0.15)
    # The values of a new critic are 0.
    assert after[0].metrics["value_mean"] > after[0].metrics["return_mean"] / 2
