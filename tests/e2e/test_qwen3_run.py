"""The recipe for Qwen3 0.6B with all that it is but its size: on vLLM's CPU build, by deltas."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.events import GenerationCompleted, PolicyPublished
from headrace.schemas.packed import unpack_i32
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.verify import check_namespace, read_all
from tests.e2e import harness, qwen3

VERSIONS = 4
RUN_S = 900.0
# A random model knows no mathematics: digits alone are drawn, and counting bits rewards some.
SMALL = (
    f"stop.versions={VERSIONS}",
    'tasks.options={"dataset": "count_bits", "size": 1000, "config": {"max_n": 31}}',
    'evaluation.options={"dataset": "count_bits", "size": 8, "seed": 1}',
    "evaluation.items=8",
    "environments.default.options={}",
    'policies.default.sampling.allowed=["0", "1", "2", "3", "4", "5"]',
    "policies.default.sampling.max_tokens=2",
    "policies.default.batches.groups=4",
    "policies.default.engine.slots=16",
    "policies.default.training.warmup_updates=0",
)


@pytest.mark.long
@pytest.mark.vllm
def test_versions_are_trained_published_as_deltas_and_served(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    model = qwen3.make(tmp_path / "qwen3")
    run_recipe(tmp_path, local_stack, namespace, model)


def run_recipe(state: Path, stack: local.LocalStack, namespace: str, model: Path) -> None:
    place = ClusterConfig(state, stack.bootstrap_servers, stack.registry_url, namespace=namespace)
    settings = (*SMALL, f"policies.default.model={model}")
    arguments = (
        *("run", "qwen3-0-6b-vllm", "--state", str(state), "--namespace", namespace),
        *("--bootstrap-servers", stack.bootstrap_servers, "--registry-url", stack.registry_url),
        *(part for setting in settings for part in ("--set", setting)),
    )

    async def main() -> None:
        async with harness.headrace(*arguments) as run:
            await run.says("running", RUN_S)
            topics = Topics(namespace, ("default",), 8)
            async with harness.watching(stack.bootstrap_servers, topics) as watch:
                await watch.count("policies", VERSIONS + 1, RUN_S)
            assert await run.ends(RUN_S) == 0, run.said
        report = await check_namespace(place)
        print(report)
        assert report.violations == []  # each evaluated token is of the pinned version, too
        assert report.dropped["evaluate"] > 0
        async with open_namespace(place, "test") as (log, _):
            deliveries, _ = await read_all(log)
        assert_served_by_deltas(Facts.of(deliveries))

    try:
        harness.run_bounded(main(), 2 * RUN_S)
        harness.gone(state)
    finally:
        harness.end_all_of(state)


def assert_served_by_deltas(facts: Facts) -> None:
    published = {one.version: one for one in facts.events(PolicyPublished)}
    assert {one.dtype for one in published.values()} == {"bfloat16"}
    initial = published[0].full
    assert initial is not None
    for number in range(1, VERSIONS + 1):
        version = published[number]
        assert (version.status, version.full_version) == ("trained", 0)
        assert [delta.to_version for delta in version.deltas] == [*range(1, number + 1)]
        assert all(delta.blob.size < initial.size / 20 for delta in version.deltas)
    assert len({one.digest for one in published.values()}) == len(published)
    drawn = [one for one in facts.events(GenerationCompleted) if one.failure is None]
    served = {version for one in drawn for version in unpack_i32(one.versions)[1::2]}
    assert served >= {0, 1, 2}
