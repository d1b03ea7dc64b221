"""The job that keeps the statistics of items: recovery from its own output, fencing, the stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from headrace.errors import Fenced, UsageError
from headrace.schemas.events import GroupClosed
from headrace.schemas.topics import GROUPS, ITEMS
from headrace.services.kafka.broker import Outgoing
from headrace.services.log.event_log import EventLog
from headrace.services.tasks.curation.item_statistics import ItemRecord, ItemStatistics
from headrace.services.tasks.curation.read_items import read_items
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs import measure_items
from tests.memory.memory_broker import MemoryBroker
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S, a_context, make_topics
from tests.unit.stream_jobs.test_batches import a_recipe
from tests.unit.tasks.test_item_statistics import a_closed_group, folded

READ_S = 1.5
"""After this time, a job has read what was sent, also on a busy machine."""


def values(statistics: ItemStatistics) -> dict[str, ItemRecord | None]:
    return {item_id: statistics.get(item_id) for item_id in statistics}


async def written(
    log: EventLog, groups: Sequence[GroupClosed], *jobs: asyncio.Future[None]
) -> None:
    """Waits until the topic `items` has the statistics of all these groups, and no others.

    Raises the error of a job that has failed meanwhile.
    """
    await written_as(log, folded(*groups), *jobs)


async def written_as(
    log: EventLog, statistics: ItemStatistics, *jobs: asyncio.Future[None]
) -> None:
    async with asyncio.timeout(BOUND_S):
        while values(await read_items(log, "default")) != values(statistics):
            for job in jobs:
                if job.done():
                    job.result()
            await asyncio.sleep(0.05)


async def follow_and_recover(context: ServiceContext, successor: ServiceContext) -> None:
    """Items are measured as groups come, after a restart, and by a successor."""
    log = context.log
    await make_topics(log)
    groups = [a_closed_group(task, f"item {task % 5}", task % 2, 1.0) for task in range(40)]
    groups[7:7] = [groups[3], groups[0]]
    for group in groups[:20]:
        await log.send(group)
    job = asyncio.ensure_future(measure_items.run(context))
    await written(log, groups[:20], job)
    # What was read is written at the end, and not only when it is due.
    with patch.object(measure_items, "WRITE_EVERY_S", 10 * BOUND_S):
        await log.send(groups[20])
        await asyncio.sleep(READ_S)
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)
    await written(log, groups[:21])

    context.stopping.clear()
    job = asyncio.ensure_future(measure_items.run(context, "default"))
    for group in groups[21:30]:
        await log.send(group)
    await written(log, groups[:30], job)
    second = asyncio.ensure_future(measure_items.run(successor, "default"))
    for group in groups[30:]:
        await log.send(group)
    await written(log, groups, second)
    # The first one finds out as soon as it writes. It may have written all of these groups before.
    async with asyncio.timeout(BOUND_S):
        while not job.done():
            groups.append(a_closed_group(len(groups), "item 0", 1.0, 0.0))
            await log.send(groups[-1])
            await asyncio.wait({job}, timeout=0.1)
    with pytest.raises(Fenced):
        await job
    await written(log, groups, second)
    successor.stopping.set()
    await asyncio.wait_for(second, BOUND_S)


def on_memory(scenario: Callable[[ServiceContext, ServiceContext], Awaitable[None]]) -> None:
    async def main() -> None:
        broker = MemoryBroker()
        contexts = [a_context(broker, "space", a_recipe(), Path()) for _ in range(2)]
        await scenario(*contexts)
        await broker.close()

    asyncio.run(main())


def test_items_are_measured_as_groups_come_and_after_a_restart() -> None:
    on_memory(follow_and_recover)


def expire_groups(log: EventLog, before: int) -> None:
    """Deletes the groups below this offset, as retention does."""
    assert isinstance(log.broker, MemoryBroker)
    log.broker._state.log(log.topics.partition(GROUPS, "default")).expire(before)


def kept(groups: Sequence[GroupClosed], *bounds: int) -> ItemStatistics:
    """The statistics of the groups with offsets from an even bound to below the next one."""
    statistics = ItemStatistics("default")
    for first, end in zip(bounds[::2], bounds[1::2], strict=True):
        for offset in range(first, end):
            statistics.on_group(groups[offset], offset)
    return statistics


def test_a_job_counts_from_the_earliest_group_that_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as that of a run which is older than the job, or was paused for months."""

    async def scenario(context: ServiceContext, successor: ServiceContext) -> None:
        log = context.log
        await make_topics(log)
        groups = [a_closed_group(task, f"item {task % 3}", task % 2, 1.0) for task in range(40)]
        for group in groups[:10]:
            await log.send(group)
        expire_groups(log, 5)
        job = asyncio.ensure_future(measure_items.run(context))
        await written_as(log, kept(groups, 5, 10))
        assert "groups 0 to 4 were deleted before they were counted" in caplog.text
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)

        for group in groups[10:]:
            await log.send(group)
        expire_groups(log, 20)
        job = asyncio.ensure_future(measure_items.run(successor))
        await written_as(log, kept(groups, 5, 10, 20, 40))
        assert "groups 10 to 19 were deleted before they were counted" in caplog.text
        successor.stopping.set()
        await asyncio.wait_for(job, BOUND_S)

    caplog.set_level("WARNING")
    on_memory(scenario)


def test_deleted_groups_that_were_counted_are_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(context: ServiceContext, successor: ServiceContext) -> None:
        log = context.log
        await make_topics(log)
        # Task 0 has no group yet, so a restart reads from the first one.
        groups = [a_closed_group(task, f"item {task % 3}", task % 2, 1.0) for task in range(1, 11)]
        for group in groups:
            await log.send(group)
        job = asyncio.ensure_future(measure_items.run(context))
        await written(log, groups)
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)
        expire_groups(log, 5)
        groups.append(a_closed_group(0, "item 0", 1.0))
        await log.send(groups[-1])
        job = asyncio.ensure_future(measure_items.run(successor))
        await written(log, groups)
        successor.stopping.set()
        await asyncio.wait_for(job, BOUND_S)

    caplog.set_level("WARNING")
    on_memory(scenario)
    assert "deleted" not in caplog.text


def test_many_changed_items_are_written_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_items, "WRITE_EVERY_S", 3_600.0)
    monkeypatch.setattr(measure_items, "MAX_CHANGED", 4)

    async def scenario(context: ServiceContext, _: ServiceContext) -> None:
        await make_topics(context.log)
        groups = [a_closed_group(task, f"item {task}", 1.0) for task in range(9)]
        for group in groups:
            await context.log.send(group)
        job = asyncio.ensure_future(measure_items.run(context))
        await written(context.log, groups[:8])
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)
        await written(context.log, groups)

    on_memory(scenario)


def test_what_is_no_event_is_parked_and_the_job_goes_on() -> None:
    async def scenario(context: ServiceContext, _: ServiceContext) -> None:
        log = context.log
        await make_topics(log)
        for name in (log.topics.name(ITEMS, "default"), log.topics.name(GROUPS, "default")):
            await log.broker.send(Outgoing(name, b"0", b"garbage"))
        job = asyncio.ensure_future(measure_items.run(context))
        filler = a_closed_group(0, "a")
        group = a_closed_group(0, "a", 1.0)
        await log.send(group)
        await written(log, [filler.model_copy(update={"task": 9}), group])
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)

    on_memory(scenario)


def test_a_policy_that_does_not_train_is_refused() -> None:
    async def scenario(context: ServiceContext, _: ServiceContext) -> None:
        with pytest.raises(UsageError, match="name one of default"):
            await measure_items.run(context, "defualt")

    on_memory(scenario)
