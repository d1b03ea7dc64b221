"""Which namespace a new run takes, what is said about those that have ended, and when it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.apply import apply, find_run
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from headrace.services.operate.run import open_run as module
from headrace.services.operate.run.open_run import choose_namespace, open_run
from headrace.services.operate.run.run_stack import RunStack
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

RECIPE = Recipe.model_validate({"name": "n", "policies": {"default": {"model": "tiny-llama"}}})
ALL = len([*topics_of(RECIPE, "n")])


def test_many_ended_runs_are_said_if_the_broker_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_RUNS", 2)
    recipe = RECIPE

    async def main() -> None:
        broker = MemoryBroker()
        connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
        said: list[str] = []

        async def end(name: str) -> None:
            log = await connection.writing_log(topics_of(recipe, name))
            await apply(log, recipe)
            await enter(log, "ended", recipe, "")

        async def choose(alone: bool = True) -> str:
            return await choose_namespace(connection, recipe, None, alone, said.append)

        assert await choose() == "n"
        await end("n")
        assert await choose() == "n-2"
        assert said == ["the run of n has ended: the new one uses n-2"]
        await end("n-2")
        assert await choose() == "n-3"
        assert said[-1].startswith("2 ended runs of n are kept"), said
        assert "headrace prune --forget" in said[-1]
        said.clear()
        assert await choose(alone=False) == "n-3"
        assert len(said) == 1, "others may need what is on a shared broker"
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


class Opening:
    """A run that is opened while its check goes on."""

    def __init__(self, folder: Path, broker: MemoryBroker | None = None, *, ours: bool) -> None:
        self.broker = broker or MemoryBroker()
        self.connection = Connection(self.broker, cast("Any", MemoryRegistry()), "test")
        self.checked = asyncio.get_running_loop().create_future()
        cluster = ClusterConfig(state=folder)
        stack = RunStack(cluster, print, print, ours=ours)
        self.opening = asyncio.create_task(
            open_run(self.connection, cluster, RECIPE, None, [], stack, self.checked, print)
        )

    async def wait_for_topics(self) -> int:
        """Returns how many topics there are when nothing more happens."""
        for _ in range(2_000):
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)
        return len(await self.broker.list_topics())


def test_topics_of_a_new_run_are_made_while_it_is_checked(tmp_path: Path) -> None:
    async def main() -> None:
        one = Opening(tmp_path, ours=True)
        assert await one.wait_for_topics() == ALL
        life = await find_run(one.connection.log(topics_of(RECIPE, "n")))
        assert life is not None
        assert life.started is None, "the run starts only after the check"
        one.checked.set_result(None)
        log, life = await one.opening
        assert log.topics.namespace == "n"
        assert life.started is not None
        await one.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_failed_check_leaves_no_topics(tmp_path: Path) -> None:
    async def main() -> None:
        one = Opening(tmp_path, ours=True)
        assert await one.wait_for_topics() > 0
        one.checked.set_exception(UsageError("the environment can't be imported"))
        with pytest.raises(UsageError, match="environment"):
            await one.opening
        assert await one.broker.list_topics() == {}
        await one.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("known", [False, True])
def test_a_run_that_is_not_new_or_not_alone_waits_for_the_check(
    tmp_path: Path, known: bool
) -> None:
    async def main() -> None:
        broker, topics = MemoryBroker(), 0
        if known:
            connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
            log = await connection.writing_log(topics_of(RECIPE, "n"))
            await apply(log, RECIPE)
            await enter(log, "ended", RECIPE, "")
            topics = ALL
        one = Opening(tmp_path, broker, ours=known)
        assert await one.wait_for_topics() == topics
        one.checked.set_exception(UsageError("no"))
        with pytest.raises(UsageError):
            await one.opening
        assert len(await one.broker.list_topics()) == topics
        await one.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))
