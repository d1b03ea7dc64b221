"""Which namespace a new run takes, and what is said about those that have ended."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.apply import apply
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from headrace.services.operate.run import open_run as module
from headrace.services.operate.run.open_run import choose_namespace
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry


def test_many_ended_runs_are_said_if_the_broker_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_RUNS", 2)
    recipe = Recipe.model_validate({"name": "n", "policies": {"default": {"model": "tiny-llama"}}})

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
