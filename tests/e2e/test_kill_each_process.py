"""Every process of a run is killed in turn, and the run learns all the same.

The first of them are killed as children of a preloader, the others after its own death.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.operate.run.children import services_of
from headrace.services.operate.verify.log_report import LogReport
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness

KILLS = (
    ("source", "env"), ("scheduler", "inference", "item-statistics"), ("agent", "assemble-batches"),
    ("assemble-groups", "trainer"),
)  # fmt: skip
"""What is killed at once: services of which none reads what another one writes."""
ALONE = tuple((service,) for services in KILLS for service in services)
RUN_S = 150.0


def topics_of(recipe: Recipe, namespace: str) -> Topics:
    return Topics(namespace, tuple(recipe.policies), recipe.partitions)


async def kill_and_see_them_replaced(
    watch: harness.LogWatch, state: Path, services: tuple[str, ...]
) -> None:
    """Waits for the first record of each replacement, and for the next version."""
    victims = {service: harness.child_of(state, service) for service in services}
    before = {one.pid for one in watch.written} | {victim.pid for victim in victims.values()}
    killed_at = time.time()
    for victim in victims.values():
        victim.kill()
    for service in services:
        first = await watch.first_by(service, before)
        print(f"{service:<17} replaced {first.at - killed_at:5.1f} s")
    await watch.more("policies", 1)
    print(f"{'':<17} version  {time.time() - killed_at:5.1f} s")


def assert_whole(report: LogReport) -> None:
    print(report)
    assert report.violations == []
    assert report.undecodable == 0
    assert report.tasks_ended == report.tasks > 0
    assert report.episodes_ended == report.episodes > 0


@pytest.mark.parametrize("kills", [KILLS, pytest.param(ALONE, marks=pytest.mark.long)])
def test_each_process_is_killed_and_the_run_learns(
    kills: Sequence[tuple[str, ...]],
    tmp_path: Path,
    local_stack: local.LocalStack,
    namespace: str,
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe("quickstart", ["stop.reward_versions=10"])
    assert {service for (service,) in ALONE} == set(services_of(recipe))

    async def main() -> None:
        arguments = (
            *("run", "quickstart", "--check", "reward>=0.95", "--check", "failures==0"),
            *("--check", f"restarts=={len(ALONE)}"),
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
                for services in kills:
                    if "assemble-groups" in services:
                        harness.preloader_of(tmp_path).kill()
                        await run.says("the preloader died and was started again")
                    await kill_and_see_them_replaced(watch, tmp_path, services)
                assert await run.ends(RUN_S) == 0, run.said
        assert_whole(await check_namespace(place))

    try:
        harness.run_bounded(main())
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
