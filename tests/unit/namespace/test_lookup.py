"""A namespace that is found by its name may be read as its recipe says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Reader
from headrace.services.namespace.apply import apply
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import (
    find_namespace,
    find_runs,
    namespaces_in,
    topics_of,
)
from headrace.services.namespace.run_life import REPLAY_OF, RunLife, enter
from headrace.services.operate.run.open_run import choose_namespace
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry


def test_references_may_lead_where_the_recipe_of_the_run_says() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
        recipe = Recipe.model_validate(
            {
                "name": "n",
                "reads_from": ["theirs"],
                "policies": {"default": {"model": "tiny-llama"}},
            }
        )
        log = await connection.writing_log(Topics("n", ("default",), recipe.partitions))
        await apply(log, recipe)
        for name in ("n", None):
            topics, _ = await find_namespace(connection, name)
            assert (topics.namespace, topics.reads_from) == ("n", frozenset({"theirs"}))
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_command_without_a_name_means_a_run_and_not_its_replay() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
        recipe = Recipe.model_validate(
            {"name": "n", "policies": {"default": {"model": "tiny-llama"}}}
        )

        async def start(name: str, reason: str = "") -> None:
            log = await connection.writing_log(topics_of(recipe, name))
            await apply(log, recipe, reason)

        async def found(*preferred: Callable[[RunLife], bool]) -> str:
            topics, _ = await find_namespace(connection, None, *preferred)
            return topics.namespace

        with pytest.raises(UsageError, match="has no run"):
            await found()
        await start("n-replay", f"{REPLAY_OF}n")
        assert await found() == "n-replay", "there is nothing else"
        await start("n")
        await start("n-replay-2", f"{REPLAY_OF}n")
        assert await found() == "n"
        assert await found(lambda life: life.ended is not None) == "n", "nothing has ended"
        assert await found(lambda life: life.replay_of == "n") == "n-replay-2"
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_however_many_runs_there_are_one_reader_reads_them() -> None:
    class CountingBroker(MemoryBroker):
        readers = 0

        def reader(self) -> Reader:
            self.readers += 1
            return super().reader()

    async def main() -> None:
        broker = CountingBroker()
        connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
        recipe = Recipe.model_validate(
            {"name": "n", "policies": {"default": {"model": "tiny-llama"}}}
        )
        for name in ("n", "n-2", "n-3", "n-5", "other"):
            log = await connection.writing_log(topics_of(recipe, name))
            await apply(log, recipe)
            await enter(log, "ended", recipe)
        broker.readers = 0
        topics, life = await find_namespace(connection, None)
        assert (topics.namespace, life.state, broker.readers) == ("other", "ended", 1)
        assert [*await find_runs(connection, recipe, "n")] == ["n", "n-2", "n-3"]
        assert broker.readers == 2
        said: list[str] = []
        assert await choose_namespace(connection, recipe, None, False, said.append) == "n-4"
        assert (said, broker.readers) == (["the run of n has ended: the new one uses n-4"], 3)
        assert await find_runs(connection, recipe, "absent") == {}
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_topics_that_other_programs_make_do_not_hide_a_run() -> None:
    async def main() -> None:
        broker = MemoryBroker()
        connection = Connection(broker, cast("Any", MemoryRegistry()), "test")
        recipe = Recipe.model_validate(
            {"name": "n", "policies": {"default": {"model": "tiny-llama"}}}
        )
        log = await connection.writing_log(topics_of(recipe, "n"))
        await apply(log, recipe)
        strange = ["_x", "z" * 64, "half"]
        await broker.create_topics({f"{name}.runs.v1": (1, {}) for name in strange})
        assert namespaces_in(await broker.list_topics()) == ["half", "n"]
        topics, _ = await find_namespace(connection, None)
        assert topics.namespace == "n"
        with pytest.raises(UsageError, match="half"):
            await find_namespace(connection, "half")
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))
