"""Answers by a JSON schema are drawn, recorded and learned from."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from headrace.infra import local
from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    PolicyPublished,
    TrajectoryRecorded,
)
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from tests.e2e import harness

RECIPE = harness.RECIPES / "structured.toml"
DIRECTIONS = {"left", "down", "right", "up"}


@pytest.mark.long
def test_a_policy_learns_what_to_say_within_a_schema(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )

    async def main() -> None:
        async with harness.headrace(*harness.arguments_of(RECIPE, place)) as run:
            assert await run.ends(120.0) == 0, run.said
        async with open_namespace(place, "test") as (log, life):
            deliveries, undecodable = await read_all(log)
        report = examine(life.recipe(), deliveries, undecodable=undecodable)
        print(report)
        assert report.violations == []
        assert_learned(Facts.of(deliveries))

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)


def assert_learned(facts: Facts) -> None:
    for trajectory in facts.events(TrajectoryRecorded):
        if trajectory.ending == "finished":
            (turn,) = trajectory.turns
            assert set(json.loads(turn.text)) == {"go"}
            assert json.loads(turn.text)["go"] in DIRECTIONS
    assert {one.ending for one in facts.events(EpisodeEnded)} <= {"finished", "cancelled"}
    for published in facts.events(PolicyPublished):
        # What the engine drew is what the trainer computes: the rest is a version's staleness.
        if published.status == "trained":
            assert abs(published.metrics["importance_mean"] - 1) < 0.2
        assert published.status != "skipped"
    rewards = [one.reward_mean for one in facts.events(BatchAssembled)]
    known = [reward for reward in rewards if reward is not None]
    assert fmean(known[:2]) < 0.6 < fmean(known[-2:])
