"""The batch job around its core: fencing, recovery from its own output, the wait, the stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Fenced, RecordsLost, UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS, BatchAssembled, GroupClosed
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import BATCHES, GROUPS, Topics
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Broker, Outgoing, Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs import assemble_batches
from headrace.stream_jobs.live_groups import READ_AGAIN
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.stream_jobs.test_batches import a_dropped_group, a_group, a_publication, a_recipe

BOUND_S = 60.0
"""No wait of these tests is longer."""


def a_context(broker: Broker, namespace: str, recipe: Recipe, state: Path) -> ServiceContext:
    codec = Codec()
    for schema_id, event_type in enumerate(EVENTS, 1):
        codec.register(event_type, schema_id)
    blobs: Any = None
    return ServiceContext(
        log=EventLog(
            broker, Topics(namespace, ["default"], 2, ["t"]), codec, MemoryRegistry(), "test"
        ),
        recipe=recipe,
        blobs=blobs,
        worker_id="test",
        state=state,
        stopping=asyncio.Event(),
        ending=asyncio.Event(),
    )


async def make_topics(log: EventLog) -> None:
    await log.broker.create_topics({topic.name: (topic.partitions, {}) for topic in log.topics})


class Batches:
    """Reads the batches topic, one by one."""

    def __init__(self, log: EventLog) -> None:
        self._reader = follow_events(log, {Partition(log.topics.name(BATCHES, "default"), 0): 0})
        self._items = aiter(self._reader)

    async def next(self) -> BatchAssembled:
        async with asyncio.timeout(BOUND_S):
            while isinstance(item := await anext(self._items), CaughtUp):
                pass
        assert isinstance(item.event, BatchAssembled)
        return item.event

    async def aclose(self) -> None:
        await self._reader.aclose()


@asynccontextmanager
async def running(context: ServiceContext) -> AsyncIterator[asyncio.Task[None]]:
    """The job, stopped cleanly at the end, unless it has ended."""
    context.stopping.clear()
    job = asyncio.ensure_future(assemble_batches.run(context, "default"))
    try:
        yield job
    finally:
        context.stopping.set()
        await asyncio.wait({job}, timeout=BOUND_S)
        assert job.done()
    if not job.cancelled():
        job.exception()


def just_ended(task: int, version: int) -> GroupClosed:
    return a_group(task, version, ended_s=now())


async def lose_the_last_batch(context: ServiceContext) -> None:
    """A batch that was written and deleted is not written a second time."""
    log = context.log
    await make_topics(log)
    batches = Batches(log)
    async with running(context):
        await log.send(just_ended(0, 0))
        await log.send(a_publication(0))
        await log.send(just_ended(1, 0))
        await batches.next()
    partition = Partition(log.topics.name(BATCHES, "default"), 0)
    assert isinstance(log.broker, MemoryBroker)
    log.broker._state.log(partition).expire(2)
    async with running(context) as job:
        with pytest.raises(RecordsLost, match="no batch of policy default"):
            await job


async def follow_and_recover(context: ServiceContext) -> None:
    """Batches are made as groups and publications come, and go on after a restart."""
    log = context.log
    await make_topics(log)
    batches = Batches(log)
    async with running(context):
        await log.send(just_ended(0, 0))
        await log.send(a_publication(0))
        await log.send(just_ended(1, 0))
        first = await batches.next()
        assert (first.version, [sample.task for sample in first.samples]) == (1, [0, 1])
        await log.send(just_ended(2, 0))

    async with running(context):
        await log.send(just_ended(1, 0))  # a late duplicate
        await log.send(a_publication(1))
        await log.send(just_ended(3, 1))
        second = await batches.next()
    assert (second.version, [sample.task for sample in second.samples]) == (2, [2, 3])
    assert (second.low_mark, second.groups_read) == (4, 5)
    await batches.aclose()


async def give_way_to_a_successor(context: ServiceContext, successor: ServiceContext) -> None:
    """A new job fences its predecessor, and no batch is missing or made twice."""
    log = context.log
    await make_topics(log)
    batches = Batches(log)
    async with running(context) as old, AsyncExitStack() as stack, asyncio.timeout(2 * BOUND_S):
        for version in count(1):
            await log.send(a_publication(version - 1))
            for task in (2 * version - 2, 2 * version - 1):
                await log.send(just_ended(task, version - 1))
            batch = await batches.next()
            assert (batch.version, batch.low_mark) == (version, 2 * version)
            if version == 1:
                await stack.enter_async_context(running(successor))
            if old.done():
                break
        with pytest.raises(Fenced):
            await old
    await batches.aclose()


def on_memory(scenario: Callable[..., Awaitable[None]], contexts: int, state: Path) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        made = [a_context(broker, "space", a_recipe(), state) for _ in range(contexts)]
        await scenario(*made)
        await broker.close()

    asyncio.run(main())


def test_batches_are_made_as_groups_come_and_go_on_after_a_restart(tmp_path: Path) -> None:
    on_memory(follow_and_recover, 1, tmp_path)


def test_a_batch_takes_the_oldest_of_all_groups_that_have_arrived(tmp_path: Path) -> None:
    async def arrive_at_once(context: ServiceContext) -> None:
        log = context.log
        await make_topics(log)
        batches = Batches(log)
        async with running(context):
            await log.send(a_publication(0))
            for task in (0, 1):
                await log.send(just_ended(task, 0))
            await batches.next()  # So it has caught up, and looks at each group.
            await log.send(a_publication(1))
            writer = await log.broker.fenced("groups")
            ended_s = (3.0, 2.0, 1.0)
            await log.send_all(writer, [a_group(2 + n, 1, ended_s=ended_s[n]) for n in range(3)])
            batch = await batches.next()
        assert [sample.task for sample in batch.samples] == [4, 3]
        await batches.aclose()

    on_memory(arrive_at_once, 1, tmp_path)


def test_it_does_not_begin_again_if_its_batches_were_deleted(tmp_path: Path) -> None:
    on_memory(lose_the_last_batch, 1, tmp_path)


def test_a_new_job_fences_its_predecessor(tmp_path: Path) -> None:
    on_memory(give_way_to_a_successor, 2, tmp_path)


def test_a_short_batch_comes_after_the_wait_without_any_further_event(tmp_path: Path) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        context = a_context(broker, "space", a_recipe(batch_wait_s=0.2), tmp_path)
        await make_topics(context.log)
        batches = Batches(context.log)
        async with running(context):
            await context.log.send(a_publication(0))
            began = now()
            await context.log.send(a_dropped_group(0, ended_s=began))
            batch = await batches.next()
            assert now() >= began + 0.2
        assert [dropped.task for dropped in batch.dropped] == [0]
        await batches.aclose()
        await broker.close()

    asyncio.run(main())


def test_after_a_pause_a_batch_is_not_short_before_the_others_could_go_on(tmp_path: Path) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        context = a_context(broker, "space", a_recipe(batch_wait_s=5.0), tmp_path)
        await make_topics(context.log)
        await context.log.send(a_publication(0))
        await context.log.send(a_group(0, 0, ended_s=now() - 3_600))
        batches = Batches(context.log)
        async with running(context):
            await asyncio.sleep(0.2)
            await context.log.send(just_ended(1, 0))
            batch = await batches.next()
        assert [sample.task for sample in batch.samples] == [0, 1]
        await batches.aclose()
        await broker.close()

    asyncio.run(main())


def test_what_is_no_group_is_parked_and_the_job_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        context = a_context(broker, "space", a_recipe(groups=1), tmp_path)
        await make_topics(context.log)
        batches = Batches(context.log)
        async with running(context):
            await broker.send(Outgoing("space.groups.default.v1", b"0", b"garbage"))
            await context.log.send(a_publication(0))
            await context.log.send(just_ended(0, 0))
            batch = await batches.next()
        assert (len(batch.samples), batch.groups_read) == (1, 2)
        dead = Partition("space.dead-letters.v1", 0)
        assert (await broker.ends([dead]))[dead] == (0, 1)
        await batches.aclose()
        await broker.close()

    asyncio.run(main())


def test_the_lengths_of_the_newest_decided_groups_are_read_again(tmp_path: Path) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        log = a_context(broker, "space", a_recipe(), tmp_path).log
        await make_topics(log)
        groups = log.topics.partition(GROUPS, "default")
        for task in range(READ_AGAIN + 100):
            await log.send(just_ended(task, 0))
        assert await assemble_batches._first_group(log, groups, READ_AGAIN + 90) == 90
        assert await assemble_batches._first_group(log, groups, 90) == 0
        broker._state.log(groups).expire(50)
        assert await assemble_batches._first_group(log, groups, 90) == 50
        assert await assemble_batches._first_group(log, groups, 40) == 40, "RecordsLost says it"
        await broker.close()

    asyncio.run(main())


def test_a_policy_that_does_not_train_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        context = a_context(MemoryBroker(), "space", a_recipe(), tmp_path)
        with pytest.raises(UsageError, match="name one of default"):
            await assemble_batches.run(context, "defualt")

    asyncio.run(main())
