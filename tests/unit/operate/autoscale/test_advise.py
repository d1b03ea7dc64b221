"""What `headrace autoscale` says about a run that has ended."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.worker_settings import Autoscale
from headrace.services.namespace.apply import apply
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.run_life import enter
from headrace.services.operate.autoscale.advise import Advice, advise
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

RECIPE = Recipe.model_validate({"name": "n", "policies": {"default": {"model": "tiny-llama"}}})


def test_a_run_that_has_ended_needs_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Advice] = []

    async def main() -> None:
        broker = MemoryBroker()
        log = await Connection(broker, cast("Any", MemoryRegistry()), "test").writing_log(
            topics_of(RECIPE, "n")
        )
        await apply(log, RECIPE)
        await enter(log, "ended", RECIPE, "enough versions")
        await advise(log, RECIPE, Autoscale(most=2), None, shown.append)
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "n: the run has ended (enough versions)\n")
    assert shown == []
