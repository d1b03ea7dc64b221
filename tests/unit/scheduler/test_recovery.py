"""A scheduler that starts in the middle of a run knows what its predecessor knew."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from headrace.schemas.events import EpisodeStarted
from headrace.schemas.topics import EPISODES
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.apply import commit_first_offsets
from headrace.services.scheduler import service
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs.batches import BatchAssembler
from tests.memory.memory_broker import MemoryBroker
from tests.unit.scheduler.test_core import task
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S, a_context, make_topics
from tests.unit.stream_jobs.test_batches import ENDED_S, a_group, a_publication, a_recipe

BATCHES = 50


async def started(context: ServiceContext) -> set[int]:
    """Returns the tasks that a scheduler starts."""
    log = context.log
    job = asyncio.ensure_future(service.run(context))
    ranges = dict.fromkeys(log.topics.partitions_of(EPISODES), WHOLE)
    found: set[int] = set()
    async with asyncio.timeout(BOUND_S):
        # It starts all that may start in one transaction.
        while not found:
            await asyncio.sleep(0.05)
            async with aclosing(read_events(log, ranges)) as events:
                async for one in events:
                    assert isinstance(one.event, EpisodeStarted)
                    found.add(one.event.task)
    context.stopping.set()
    await asyncio.wait_for(job, BOUND_S)
    return found


def test_a_successor_knows_the_groups_that_old_batches_allow_to_replay() -> None:
    # Given batches whose groups were trained on long ago, but not too long ago to be replayed,
    recipe = a_recipe(groups=4, replay={"share": 0.5, "max_age": BATCHES + 10})

    async def main() -> set[int]:
        broker = MemoryBroker()
        context = a_context(broker, "space", recipe, Path())
        log = context.log
        await make_topics(log)
        await commit_first_offsets(broker, log.topics)
        assembler = BatchAssembler(recipe, "default")
        for number in range(4):
            assembler.on_group(a_group(1_000 + number, 0), number)
        assembler.on_policy(a_publication(0))
        first = assembler.next_batch(ENDED_S)
        assert first is not None
        batches = [first.model_copy(update={"version": 1 + number}) for number in range(BATCHES)]
        batches[1:] = [one.model_copy(update={"samples": ()}) for one in batches[1:]]
        writer = await broker.fenced("batches")
        for batch in batches:
            await log.send_all(writer, [batch])
        await writer.close()
        for version in range(BATCHES + 1):
            await log.send(a_publication(version))
        for number in range(20):
            await log.send(task(number))
        found = await started(context)
        await broker.close()
        return found

    # Then a new scheduler starts what the next two batches need beside them.
    assert asyncio.run(main()) == set(range(4))
