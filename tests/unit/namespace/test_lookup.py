"""A namespace that is found by its name may be read as its recipe says."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.namespace.apply import apply
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import find_namespace
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
