"""`headrace quota` on a real broker: limits of tenants change while a run goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from headrace.infra import local
from headrace.schemas.events import TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.lookup import topics_of
from headrace.services.operate.cli import cli
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.commands import cluster_variables
from tests.integration.test_cancel import VERSION_0, headrace, serving

SETTINGS = (
    *("scheduler.live_episodes=4", "tasks.samples=1", "tasks.deadline_s=600"),
    *("scheduler.tenants.a.live_episodes=1", "scheduler.require_reports=false"),
)


def of(recipe: Recipe, tenant: str, number: int) -> TaskSubmitted:
    made = TaskMaker(recipe, "team").make(Item("item"), f"{tenant}{number}")
    return made.model_copy(update={"tenant": tenant})


def test_a_quota_changes_what_starts_next(
    tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    environment = cluster_variables(local_stack, namespace)
    recipe = read_recipe("null", SETTINGS)
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)

    async def rows() -> dict[str, Any]:
        found = await asyncio.to_thread(
            CliRunner().invoke, cli, ["quota", "--json"], env=environment
        )
        assert found.exit_code == 0, found.output
        return {one.pop("tenant"): one for one in json.loads(found.stdout)}

    async def main() -> None:
        async with connect(cluster, "test") as connection:
            log = await connection.writing_log(topics_of(recipe, namespace))
            await apply(log, recipe)
            for number in range(4):
                await log.send(of(recipe, "a", number))
            for number in range(4):
                await log.send(of(recipe, "b", number))
            await log.send(VERSION_0)
            async with serving(log, recipe, tmp_path) as watch:
                await watch.until(started={0, 4, 5, 6}, ended=set())
                limit = {"weight": 1.0, "live_episodes": 1}
                no_limit = {"weight": 1.0, "live_episodes": None}
                assert await rows() == {
                    "a": {**limit, "queued": 3, "live": 1},
                    "b": {**no_limit, "queued": 1, "live": 3},
                }
                # Then b may have nothing more, and what ends makes room for a.
                await headrace("quota", "b", "--live-episodes", "0", environment=environment)
                (changed,) = await headrace(
                    *("quota", "a", "--live-episodes", "2", "--reason", "test"),
                    environment=environment,
                )
                assert (changed["live_episodes"], changed["reason"]) == (2, "test")
                await headrace("cancel", "4", "5", environment=environment)
                await watch.until(started={0, 4, 5, 6, 1}, ended={4, 5})
                await headrace(
                    "quota", "b", "--unlimited", "--weight", "2", environment=environment
                )
                await watch.until(started={0, 4, 5, 6, 1, 7}, ended={4, 5})
                assert await rows() == {
                    "a": {**limit, "live_episodes": 2, "queued": 2, "live": 2},
                    "b": {**no_limit, "weight": 2.0, "queued": 0, "live": 2},
                }

    asyncio.run(main())


def test_options_that_do_not_fit_are_refused(
    local_stack: local.LocalStack, namespace: str, tmp_path: Path
) -> None:
    environment = cluster_variables(local_stack, namespace)
    recipe = read_recipe("null", SETTINGS)
    cluster = ClusterConfig(tmp_path, local_stack.bootstrap_servers, local_stack.registry_url)

    async def made() -> None:
        async with connect(cluster, "test") as connection:
            await apply(await connection.writing_log(topics_of(recipe, namespace)), recipe)

    asyncio.run(made())
    for arguments, message in (
        (["a"], "say what to change"),
        (["--weight", "2"], "name the tenant to change"),
        (["a", "--unlimited", "--live-episodes", "3"], "not both"),
        (["a", "--weight", "0"], "not in the range"),
    ):
        found = CliRunner().invoke(cli, ["quota", *arguments], env=environment)
        assert found.exit_code != 0
        assert message in f"{found.output} {found.exception}"
    found = CliRunner().invoke(cli, ["quota", "typo", "--weight", "2"], env=environment)
    assert (found.exit_code, found.stdout) == (0, "typo: weight 2, live episodes unlimited\n")
    assert "does not name the tenant typo" in found.stderr
