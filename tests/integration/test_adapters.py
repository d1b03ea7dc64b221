"""A run of two policies that are adapters of one base, through a real Kafka."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.events import PolicyPublished
from headrace.schemas.topics import POLICIES
from headrace.services.kafka.broker import Partition
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.verify import check_namespace
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace

RECIPE = """
name = "opposites"

[stop]
versions = 4

[tasks]
use = "count"
environment = false
roles = { left = "left", right = "right" }
samples = 8
max_turns = 2
max_tokens = 2

[agents.default]
use = "tests.integration.opposites:solve"
"""
POLICY = """
[policies.{name}]
model = "tiny-llama"

[policies.{name}.lora]
rank = 4
alpha = 16.0

[policies.{name}.engine]
device = "cpu"

[policies.{name}.sampling]
max_tokens = 1
allowed = ["L", "R"]

[policies.{name}.batches]
groups = 2

[policies.{name}.training]
learning_rate = 0.01
device = "cpu"
"""


@pytest.mark.long
def test_two_adapters_of_one_base_are_trained_and_served(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    recipe = tmp_path / "opposites.toml"
    recipe.write_text(RECIPE + POLICY.format(name="left") + POLICY.format(name="right"))
    environment = cluster_variables(local_stack, namespace, tmp_path)
    summary = json.loads(headrace(("run", str(recipe), "--json", "--quiet"), environment))
    assert (summary["failures"], summary["restarts"]) == (0, 0), summary

    servers, registry = local_stack.bootstrap_servers, local_stack.registry_url
    cluster = ClusterConfig(tmp_path, servers, registry, namespace=namespace)
    report = asyncio.run(check_namespace(cluster))
    assert report.violations == []
    # Whose samples are at most one version behind: so versions up to 2, at least, were served.
    assert min(report.versions["left"], report.versions["right"]) >= 4

    published = asyncio.run(publications(cluster))
    newest = [one for one in published if one.version == 4]
    assert {one.policy for one in newest} == {"left", "right"}
    assert len({one.digest for one in newest}) == 2
    assert len({one.adapter and one.adapter.base for one in published} - {None}) == 1
    whole = published[0].adapter
    assert whole is not None
    assert all(one.full and 4 * one.full.size < whole.base.size for one in published)
    page = headrace(("show", "version:left/4"), environment)
    assert "rank 4, alpha 16" in page
    assert f"{whole.base.sha256.hex()}, {whole.base.size:,} bytes, in the blob store" in page


async def publications(cluster: ClusterConfig) -> list[PolicyPublished]:
    async with open_namespace(cluster, "test") as (log, _):
        place = Partition(log.topics.name(POLICIES), 0)
        events = [delivery.event async for delivery in read_events(log, {place: WHOLE})]
        return [event for event in events if isinstance(event, PolicyPublished)]
