"""Policies of two sizes and one that is not trained, in one run through a real Kafka."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from statistics import fmean

import pytest

from headrace.infra import local
from headrace.schemas.events import PolicyPublished, TaskEnded
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace

RECIPE = """
name = "sizes"

[stop]
versions = 6  # a run does not wait for a round of evaluation, and the one of version 0 is read

[tasks]
use = "count"
environment = false
roles = { small = "small", large = "large", frozen = "frozen" }
samples = 4
max_turns = 3
max_tokens = 3

[agents.default]
use = "tests.integration.opposites:differ"

[barrier]

[evaluation]
every = 2
items = 2
samples = 4
"""
POLICY = """
[policies.{name}]
model = "{model}"
{training}

[policies.{name}.engine]
device = "cpu"

[policies.{name}.sampling]
max_tokens = 1
allowed = ["L", "R"]

[policies.{name}.batches]
groups = 2
"""
LEARNS = 'training = { learning_rate = 0.01, device = "cpu" }'


def test_each_policy_learns_or_stays_and_is_evaluated_by_its_own_reward(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = tmp_path / "sizes.toml"
    policies = (
        ("small", "tiny-llama", LEARNS),
        ("large", "small-llama", LEARNS),
        ("frozen", "tiny-llama", "training = false"),
    )
    texts = [POLICY.format(name=name, model=model, training=how) for name, model, how in policies]
    recipe.write_text(RECIPE + "".join(texts))
    environment = cluster_variables(local_stack, namespace, tmp_path)
    summary = json.loads(headrace(("run", str(recipe), "--json", "--quiet"), environment))
    assert (summary["failures"], summary["restarts"]) == (0, 0), summary

    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    facts = asyncio.run(judged(ClusterConfig(tmp_path, servers, registry, namespace=namespace)))
    published = {(one.policy, one.version): one for one in facts.events(PolicyPublished)}
    assert [version for name, version in published if name == "frozen"] == [0]
    for name in ("small", "large"):
        assert published[name, 2].digest != published[name, 0].digest
    small, large = published["small", 0].full, published["large", 0].full
    assert small is not None
    assert large is not None
    assert large.size > 2 * small.size

    for name in ("small", "large"):
        rewards = [
            outcome.rewards[name]
            for ended in facts.events(TaskEnded)
            for outcome in ended.outcomes
            if ended.purpose == "evaluate"
            for use in outcome.policies
            if use.policy == name and use.oldest_version == 0
        ]
        assert len(rewards) == 8
        avg = summary["evaluations"][name]["0"]["avg"]["value"]
        assert avg == pytest.approx(fmean(rewards))


async def judged(cluster: ClusterConfig) -> Facts:
    log: EventLog
    async with open_namespace(cluster, "checker") as (log, life):
        deliveries, _ = await read_all(log)
        assert examine(life.recipe(), deliveries).violations == []
    return Facts.of(deliveries)
