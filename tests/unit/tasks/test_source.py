"""The task source without curators: what a successor reads again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from headrace.schemas.topics import TASKS
from headrace.services.tasks import source
from headrace.services.tasks.task_maker import Item
from tests.memory.memory_broker import MemoryBroker
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S, a_context, make_topics
from tests.unit.tasks.test_curation import curated

ROWS = 100
READ: list[int] = []


def rows() -> Iterator[Item]:
    """A data set whose rows are counted when they are read."""
    for number in range(ROWS):
        READ.append(number)
        yield Item(str(number))


def test_a_successor_begins_in_the_last_epoch_and_lets_others_run() -> None:
    async def main() -> None:
        recipe = curated(use=f"{__name__}:rows", options={}, epochs=5)
        recipe = recipe.model_copy(
            update={"tasks": recipe.tasks.model_copy(update={"backlog": 3 * ROWS - 10})}
        )
        broker = MemoryBroker()
        context = a_context(broker, "space", recipe, Path())
        await make_topics(context.log)
        tasks = context.log.topics.partition(TASKS)

        async def submitted(count: int) -> None:
            while (await broker.ends([tasks]))[tasks][1] < count:
                await asyncio.sleep(0.01)

        first = asyncio.ensure_future(source.run(context))
        await submitted(3 * ROWS - 10)
        first.cancel()
        await asyncio.wait([first])
        READ.clear()
        turns = 0
        second = asyncio.ensure_future(source.run(context))
        while len(READ) < ROWS - 10:
            await asyncio.sleep(0)
            turns += 1
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.wait([second])
        assert list(range(ROWS - 9)) == READ, "two whole epochs are not read again"
        assert turns >= ROWS - 10
        assert (await broker.ends([tasks]))[tasks][1] == 3 * ROWS - 10
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))


def test_the_last_epoch_is_that_of_the_data_set_alone() -> None:
    assert source.last_epoch([]) == 0
    assert source.last_epoch(["0-12", "10-3", "9-99", "warm-start-70-1", "7"]) == 10
