"""A run that starts inference workers while its trainer waits, and drains them when it is slow.

One of the workers that drain is killed. Nothing is lost, nothing counts twice, and what the run
costs equals a sum that is made by hand.
"""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.schemas.events import InstanceStateEntered
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import INSTANCES
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import read_life
from headrace.services.operate.cost.cost_report import CostReport, read_cost
from headrace.services.operate.verify.verify import check_namespace
from tests.e2e import harness

RECIPE = harness.RECIPES / "scaled.toml"
RUN_S = 240.0
LIMIT_S = 580.0


async def lives(place: ClusterConfig, recipe: Recipe) -> tuple[CostReport, dict[str, list[float]]]:
    """What the run cost; and by service, how long each worker lived until its last record."""
    assert place.namespace is not None
    seen: dict[str, tuple[str, float, float]] = {}
    async with connect(place, "test") as connection:
        log = connection.log(topics_of(recipe, place.namespace))
        at = {log.topics.partition(INSTANCES): WHOLE}
        async with aclosing(read_events(log, at)) as deliveries:
            async for delivery in deliveries:
                event = delivery.event
                if isinstance(event, InstanceStateEntered) and event.service:
                    began_s = event.began_at / 1000
                    seen[event.instance] = event.service, began_s, delivery.recorded_at
        report = await read_cost(log, await read_life(log), {}, None)
    seconds: dict[str, list[float]] = {}
    for service, began_s, last_s in seen.values():
        seconds.setdefault(service, []).append(last_s - began_s)
    return report, seconds


@pytest.mark.long
def test_workers_come_and_go_and_nothing_is_lost(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    place = ClusterConfig(
        tmp_path, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe(str(RECIPE))

    async def main() -> None:
        command = harness.arguments_of(RECIPE, place)
        async with harness.headrace(*command, "--check", "failures==0") as run:
            await run.says("inference-3 was started", RUN_S)
            await run.says("inference-3 drains", RUN_S)
            workers = harness.processes_of(tmp_path, "serve", "inference")
            max(workers, key=lambda one: one.create_time()).kill()
            await run.says("inference-3 was killed by SIGKILL after its drain")
            await run.says("inference-2 ended with exit code 0 after its drain", RUN_S)
            assert await run.ends(RUN_S) == 0, run.said
            print(run.said)
        report = await check_namespace(place)
        print(report)
        assert report.violations == []
        assert report.tasks_ended == report.tasks > 0
        assert report.episodes_ended == report.episodes > 0

        cost, seconds = await lives(place, recipe)
        pools = {pool.pool: pool for pool in cost.pools}
        assert pools["inference"].workers == len(seconds["inference"]) >= 3
        assert pools["inference"].peak == 3
        # Only the killed one may still count as alive, for it did not say that it ended.
        assert sum(pool.alive for pool in cost.pools) <= 1
        for pool in pools.values():
            if not pool.alive:
                assert pool.hours * 3600 == pytest.approx(sum(seconds[pool.pool]))
        trainer = sum(seconds["trainer"]) * 5 / 3600
        assert pools["trainer"].cost == pytest.approx(trainer)
        assert cost.cost == pytest.approx(trainer + pools["inference"].hours * 2)
        assert pools["inference"].hours < pools["inference"].fixed_hours
        assert cost.versions["default"] >= 38

    try:
        harness.run_bounded(main(), LIMIT_S)
        harness.gone(tmp_path)
    finally:
        harness.end_all_of(tmp_path)
