"""Every process of a run is killed in turn, and the run learns all the same.

The first of them are killed as children of a preloader, the others after its own death.
"""

from __future__ import annotations

import time
from pathlib import Path

from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from tests.checker import Report, check_namespace
from tests.e2e import harness

SERVICES = (
    "source", "scheduler", "agent", "env", "inference",
    "assemble-groups", "assemble-batches", "trainer",
)  # fmt: skip
RUN_S = 150.0


def topics_of(recipe: Recipe, namespace: str) -> Topics:
    return Topics(namespace, tuple(recipe.policies), recipe.partitions)


async def kill_and_see_it_replaced(
    watch: harness.LogWatch, state: Path, service: str
) -> tuple[float, float]:
    """Seconds from the kill to the first record of the replacement, and to the next version."""
    victim = harness.child_of(state, service)
    before = {one.pid for one in watch.written if one.service == service} | {victim.pid}
    killed_at = time.time()
    victim.kill()
    first = await watch.first_by(service, before)
    await watch.more("policies", 1)
    return first.at - killed_at, time.time() - killed_at


def assert_whole(report: Report) -> None:
    print(report)
    assert report.violations == []
    assert report.undecodable == 0
    assert report.tasks_ended == report.tasks > 0
    assert report.episodes_ended == report.episodes > 0


def test_each_process_is_killed_and_the_run_learns(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe("quickstart", ["stop.reward_versions=10"])

    async def main() -> None:
        arguments = (
            *("run", "quickstart", "--check", "reward>=0.95", "--check", "failures==0"),
            *("--check", f"restarts=={len(SERVICES)}"),
            # Long enough for all to be killed before it ends.
            *("--set", "stop.reward_versions=10"),
            *("--state", str(tmp_path), "--namespace", namespace),
            *("--bootstrap-servers", local_stack.bootstrap_servers),
            *("--registry-url", local_stack.registry_url),
        )
        async with harness.headrace(*arguments) as run:
            await run.says("running")
            topics = topics_of(recipe, namespace)
            async with harness.watching(local_stack.bootstrap_servers, topics) as watch:
                await watch.count("policies", 2)
                for service in SERVICES:
                    if service == "assemble-groups":
                        harness.preloader_of(tmp_path).kill()
                        await run.says("the preloader died and was started again")
                    replaced_s, version_s = await kill_and_see_it_replaced(watch, tmp_path, service)
                    print(f"{service:<17} replaced {replaced_s:5.1f} s, version {version_s:5.1f} s")
                assert await run.ends(RUN_S) == 0, run.said
        assert_whole(await check_namespace(place))

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
