"""A batch that refers to another namespace: refused, unless the recipe names that namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.topics import DEAD_LETTERS
from headrace.services.kafka.broker import Broker
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.log.log_reader import WHOLE, read_records
from tests.integration.test_trainer import RECIPE, Bench, facts
from tests.memory.memory_broker import MemoryBroker

BOUND_S = 60.0

OnLog = Callable[[Callable[[Broker], Coroutine[Any, Any, None]]], None]


@pytest.fixture(params=["memory", "kafka"])
def on_log(request: pytest.FixtureRequest) -> OnLog:
    """Runs a scenario on the log in memory, and on the real broker."""

    def run(scenario: Callable[[Broker], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            broker: Broker = MemoryBroker()
            if request.param == "kafka":
                servers = request.getfixturevalue("kafka")
                broker = KafkaBroker(KafkaSettings(servers, "test"))
            async with asyncio.timeout(BOUND_S):
                await scenario(broker)
            await broker.close()

        asyncio.run(main())

    return run


async def dead_letters(bench: Bench) -> list[str]:
    """Why each dead letter is one."""
    partition = bench.log.topics.partition(DEAD_LETTERS)
    async with aclosing(read_records(bench.log.broker, {partition: WHOLE})) as records:
        return [
            dict(record.headers)["__connect.errors.exception.message"].decode()
            async for record in records
        ]


def test_a_batch_of_another_namespace_is_a_dead_letter_and_training_goes_on(
    on_log: OnLog, namespace: str, tmp_path: Path
) -> None:
    async def scenario(broker: Broker) -> None:
        theirs = Bench(broker, tmp_path, f"{namespace}-theirs")
        ours = Bench(broker, tmp_path, namespace)
        for bench in (theirs, ours):
            await bench.make_topics()
        await ours.log.send(await theirs.submit(1))
        await ours.submit(1)
        published = await ours.train(1)
        assert facts(published) == [(0, "initial", 0), (1, "trained", 2)]
        assert published[1].batch is not None
        assert published[1].batch.offset == 1, "their batch came first"
        (reason,) = await dead_letters(ours)
        assert f"'{namespace}-theirs'" in reason

    on_log(scenario)


def test_a_batch_of_a_namespace_that_the_recipe_names_is_trained_on(
    on_log: OnLog, namespace: str, tmp_path: Path
) -> None:
    async def scenario(broker: Broker) -> None:
        theirs = Bench(broker, tmp_path, f"{namespace}-theirs")
        recipe = RECIPE.model_copy(update={"reads_from": (f"{namespace}-theirs",)})
        ours = Bench(broker, tmp_path, namespace, recipe)
        for bench in (theirs, ours):
            await bench.make_topics()
        await ours.log.send(await theirs.submit(1))
        published = await ours.train(1)
        assert facts(published) == [(0, "initial", 0), (1, "trained", 2)]
        assert await dead_letters(ours) == []

    on_log(scenario)
