"""A filter, replay, curators and a curriculum in one run, while each of its processes is killed.

All that is judged afterwards is in the log.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from headrace.infra import local
from headrace.schemas.events import BatchAssembled, GroupClosed, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES, GROUPS, TASKS, Topic, Topics
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_events, read_records
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.run.children import services_of
from headrace.services.operate.verify.verify import check_namespace
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from headrace.services.tasks.curation.read_items import read_items
from tests.commands import cluster_variables, run_command
from tests.e2e import harness
from tests.e2e.test_kill_each_process import assert_whole, kill_and_see_them_replaced
from tests.unit.stream_jobs.test_measure_items import values

RECIPE = harness.RECIPES / "data-algorithms.toml"
RUN_S = 600.0
FILLED = 10
"""From this batch on, the pool has enough groups."""


async def kill_each(recipe: Recipe, cluster: ClusterConfig) -> None:
    """Kills every service once, in any order, then all of them at once; then the run ends."""
    seed = int(os.environ.get("HEADRACE_SEED", random.randrange(10**6)))
    print(f"HEADRACE_SEED={seed}")
    services = services_of(recipe)
    random.Random(seed).shuffle(services)
    assert cluster.namespace is not None
    assert cluster.bootstrap_servers is not None
    topics = Topics(cluster.namespace, tuple(recipe.policies), recipe.partitions)
    run_arguments = harness.arguments_of(RECIPE, cluster)
    async with harness.headrace(*run_arguments) as run:
        await run.says("running", RUN_S)
        async with harness.watching(cluster.bootstrap_servers, topics) as watch:
            await watch.count("policies", 12, RUN_S)
            for number, service in enumerate(services):
                if number == len(services) // 2:
                    harness.preloader_of(cluster.state).kill()
                    await run.says("the preloader died and was started again")
                await kill_and_see_them_replaced(watch, cluster.state, (service,))
            await kill_and_see_them_replaced(watch, cluster.state, tuple(services))
            await watch.more("policies", 12, RUN_S)
        await harness.headrace_done("end", *run_arguments[2:], bound_s=RUN_S)
        assert await run.ends(RUN_S) == 0, run.said


async def read(log: EventLog, topic: Topic[Any], policy: str | None) -> list[Delivery[Any]]:
    ranges = dict.fromkeys(log.topics.partitions_of(topic, policy), WHOLE)
    async with aclosing(read_events(log, ranges)) as events:
        return [one async for one in events]


def assert_replays_as_configured(recipe: Recipe, batches: list[BatchAssembled]) -> None:
    settings = recipe.policies["default"].batches
    assert settings.replay is not None
    uses = Counter((one.task, one.sample) for batch in batches for one in batch.samples)
    assert max(uses.values()) == settings.replay.max_uses
    whole = [batch for batch in batches[FILLED:] if _groups(batch) == settings.groups]
    assert len(batches) - FILLED - len(whole) <= 1, "only the last batch may be short"
    replayed = sum(_groups(batch, replayed=True) for batch in whole)
    found = replayed / sum(map(_groups, whole))
    print(f"{len(batches)} batches, share of replayed groups {found:.4f}")
    assert abs(found - settings.replay.share) <= 1 / len(whole) / settings.groups


def _groups(batch: BatchAssembled, *, replayed: bool = False) -> int:
    return len({one.task for one in batch.samples if one.use or not replayed})


def assert_items_as_undisturbed(recorded: ItemStatistics, groups: list[Delivery[Any]]) -> None:
    """What a successor of the job would have, and what one has that was never killed."""
    undisturbed = ItemStatistics("default")
    behind = 0
    for one in groups:
        assert isinstance(one.event, GroupClosed)
        undisturbed.on_group(one.event, one.offset)
        if one.offset >= recorded.tasks.groups_read:
            behind += recorded.on_group(one.event, one.offset)
    print(f"{len(undisturbed)} items of {len(groups)} groups, {behind} groups not written yet")
    assert values(recorded) == values(undisturbed)


def assert_each_algorithm_at_work(
    tasks: list[TaskSubmitted], groups: list[GroupClosed], batches: list[BatchAssembled]
) -> None:
    labels = [one.labels for one in tasks if "curation.state" in one.labels]
    stages = Counter(one["curation.stage"] for one in labels)
    skipped: Counter[str] = Counter()
    for one in labels:
        skipped.update(json.loads(one["curation.skipped"]))
    dropped = Counter(one.reason for one in groups if one.verdict == "dropped")
    replayed = Counter(one.use for batch in batches for one in batch.samples)
    print(f"tasks {dict(stages)}, skipped {dict(skipped)}, dropped {dict(dropped)}, {replayed}")
    assert stages.keys() == {"useful", "mixed"}
    assert skipped.keys() == {"greso", "pass_rate"}
    assert dropped["zero_advantage"] > 0
    assert replayed.keys() == {0, 1, 2}


async def batch_records(log: EventLog, namespace: str) -> list[tuple[bytes | None, bytes | None]]:
    name = Topics(namespace, ("default",), 1).name(BATCHES, "default")
    async with aclosing(read_records(log.broker, {Partition(name, 0): WHOLE})) as records:
        return [(one.key, one.value) async for one in records]


@pytest.mark.long
def test_every_process_of_all_data_algorithms_is_killed_and_the_log_cant_tell(
    state: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    cluster = ClusterConfig(
        state, local_stack.bootstrap_servers, local_stack.registry_url, namespace=namespace
    )
    recipe = read_recipe(str(RECIPE), [])

    async def run_and_judge() -> None:
        await kill_each(recipe, cluster)
        assert_whole(await check_namespace(cluster))
        async with open_namespace(cluster, "test") as (log, _):
            tasks = [one.event for one in await read(log, TASKS, None)]
            groups = await read(log, GROUPS, "default")
            batches = [one.event for one in await read(log, BATCHES, "default")]
            assert_each_algorithm_at_work(tasks, [one.event for one in groups], batches)
            assert_replays_as_configured(recipe, batches)
            assert_items_as_undisturbed(await read_items(log, "default"), groups)

    harness.run_bounded(run_and_judge(), 2 * RUN_S)
    harness.gone(state)
    variables = cluster_variables(local_stack, namespace, state)
    done = run_command(("replay", "batches", "--json"), variables, timeout_s=RUN_S)
    assert done.returncode == 0, done.stderr
    replayed = json.loads(done.stdout)
    assert all((one["batch"], one["same"]) == ("same", True) for one in replayed["versions"])

    async def compare() -> None:
        async with open_namespace(cluster, "test") as (log, _):
            original = await batch_records(log, namespace)
            again = await batch_records(log, replayed["namespace"])
            assert again == original[: len(again)], "byte by byte"
            assert len(again) == len(replayed["versions"]) - 1

    harness.run_bounded(compare())
