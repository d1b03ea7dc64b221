"""The two stream jobs on a real Kafka: Faust's reading and commits, kill -9, fencing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from aiokafka.cluster import ClusterMetadata  # type: ignore[import-untyped]
from faust.transport.drivers.aiokafka import Consumer

from headrace.schemas.events import GroupClosed
from headrace.schemas.topics import DEAD_LETTERS, GROUPS, RESULTS
from headrace.services.kafka.broker import Outgoing, Partition, Position
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs import assemble_groups
from tests.integration.job_process import a_kafka_context, start_job
from tests.integration.stranger import send_unreadable_header
from tests.unit.stream_jobs.test_assemble_batches import (
    BOUND_S,
    follow_and_recover,
    give_way_to_a_successor,
    make_topics,
)
from tests.unit.stream_jobs.test_groups import a_task, an_outcome


async def apply(log: EventLog) -> None:
    await make_topics(log)
    await log.broker.commit_first(f"{log.topics.namespace}.assemble-groups", results_of(log))


def results_of(log: EventLog) -> list[Partition]:
    return log.topics.partitions_of(RESULTS)


async def send_results(log: EventLog, first: int, count: int) -> None:
    outcomes = [an_outcome(0), an_outcome(1, 0.0)]
    tasks = range(first, first + count)
    await asyncio.gather(*(log.send(a_task(outcomes, task=task)) for task in tasks))


async def read_groups(log: EventLog, tasks: int) -> list[int]:
    """The tasks of all groups, read until `tasks` different ones have come, and to the end."""
    found: list[int] = []
    reader = follow_events(log, {Partition(log.topics.name(GROUPS, "default"), 0): 0})
    caught_up = False
    async with asyncio.timeout(2 * BOUND_S):
        async for item in reader:
            if isinstance(item, CaughtUp):
                caught_up = True
            else:
                assert isinstance(item.event, GroupClosed)
                found.append(item.event.task)
            if caught_up and len(set(found)) >= tasks:
                break
    await reader.aclose()
    return found


async def wait_for_commit(log: EventLog) -> None:
    """Until the group has committed all there is of `results`."""
    consumer_group = f"{log.topics.namespace}.assemble-groups"
    async with asyncio.timeout(BOUND_S):
        while True:
            offsets = await log.broker.committed(consumer_group, results_of(log))
            ends = await log.broker.ends(results_of(log))
            if all(offsets[partition].offset == end for partition, (_, end) in ends.items()):
                return
            await asyncio.sleep(0.2)


async def with_results(kafka: str, namespace: str, folder: Path) -> ServiceContext:
    """Returns the context of a job in a new namespace, in which twenty tasks have ended."""
    context = a_kafka_context(kafka, namespace, folder)
    await apply(context.log)
    await send_results(context.log, 0, 20)
    return context


def test_every_result_becomes_a_group_and_what_is_none_is_parked(
    kafka: str, namespace: str, tmp_path: Path
) -> None:
    async def main() -> None:
        context = await with_results(kafka, namespace, tmp_path)
        log = context.log
        for value in (b"garbage", b""):
            await log.broker.send(Outgoing(log.topics.name(RESULTS), b"0", value))
        job = asyncio.ensure_future(assemble_groups.run(context, kafka))
        await send_results(log, 20, 20)
        assert sorted(await read_groups(log, 40)) == list(range(40))
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)
        await wait_for_commit(log)
        dead = Partition(log.topics.name(DEAD_LETTERS), 0)
        assert (await log.broker.ends([dead]))[dead] == (0, 2)
        await log.broker.close()

    asyncio.run(main())


def test_a_header_whose_name_is_not_text_does_not_end_the_job(
    kafka: str, namespace: str, tmp_path: Path
) -> None:
    async def main() -> None:
        context = await with_results(kafka, namespace, tmp_path)
        log = context.log
        result = log.outgoing(a_task([an_outcome(0), an_outcome(1, 0.0)], task=20))
        for value in (b"garbage", result.value):
            await send_unreadable_header(kafka, result.topic, value)
        await send_results(log, 21, 20)
        job = asyncio.ensure_future(assemble_groups.run(context, kafka))
        reading = asyncio.ensure_future(read_groups(log, 41))
        await asyncio.wait({job, reading}, return_when=asyncio.FIRST_COMPLETED)
        assert not job.done(), job.result()
        assert sorted(await reading) == list(range(41))
        await wait_for_commit(log)
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)
        dead = Partition(log.topics.name(DEAD_LETTERS), 0)
        (record,) = await log.broker.fetch([Position(dead, 0)])
        assert record.value == b"garbage"
        assert ("\ufffd", b"1") in record.headers
        await log.broker.close()

    asyncio.run(main())


def test_a_topic_that_a_starting_broker_does_not_name_yet_is_read_soon(
    kafka: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names, update = ClusterMetadata.partitions_for_topic, ClusterMetadata.update_metadata
    seek, fetch = Consumer.perform_seek, Consumer._getmany
    sighted: set[int] = set()
    seeking = 0
    fetched_early: list[Any] = []

    def partitions_for_topic(self: ClusterMetadata, topic: str) -> set[int] | None:
        return names(self, topic) if id(self) in sighted else None

    def update_metadata(self: ClusterMetadata, metadata: Any) -> None:
        # In the consumer's own thread, as real news comes: never in the midst of an assignment.
        if "missing topic" in caplog.text:
            sighted.add(id(self))
        update(self, metadata)

    async def perform_seek(self: Any) -> None:
        nonlocal seeking
        seeking += 1
        try:
            await seek(self)
            await asyncio.sleep(1.5)  # It looks for partitions to fetch from every second.
        finally:
            seeking -= 1

    async def getmany(self: Any, active_partitions: Any, timeout: float) -> Any:
        if seeking:  # What it fetches now it throws away.
            fetched_early.append(active_partitions)
        return await fetch(self, active_partitions, timeout)

    async def main() -> None:
        context = await with_results(kafka, namespace, tmp_path)
        log = context.log
        monkeypatch.setattr(Consumer, "perform_seek", perform_seek)
        monkeypatch.setattr(Consumer, "_getmany", getmany)
        monkeypatch.setattr(ClusterMetadata, "partitions_for_topic", partitions_for_topic)
        monkeypatch.setattr(ClusterMetadata, "update_metadata", update_metadata)
        job = asyncio.ensure_future(assemble_groups.run(context, kafka))
        try:
            assert sorted(await read_groups(log, 20)) == list(range(20))
            assert "missing topic" in caplog.text
            assert not fetched_early
        finally:
            context.stopping.set()
            await asyncio.wait_for(job, BOUND_S)
            await log.broker.close()

    asyncio.run(main())


def test_what_comes_while_a_rebalance_ends_is_read_again(
    kafka: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faust drops what was on its way when it stopped the flow. Nothing is committed yet."""
    plain, dropped = Consumer._wait_next_records, 0

    async def stop_once(consumer: Any, timeout: float) -> Any:
        nonlocal dropped
        found = await plain(consumer, timeout)
        if found[0] and not dropped:
            dropped = sum(map(len, found[0].values()))
            consumer.stop_flow()
            asyncio.get_running_loop().call_later(0.2, consumer.resume_flow)
        return found

    monkeypatch.setattr(Consumer, "_wait_next_records", stop_once)

    async def main() -> None:
        context = await with_results(kafka, namespace, tmp_path)
        job = asyncio.ensure_future(assemble_groups.run(context, kafka))
        assert sorted(await read_groups(context.log, 20)) == list(range(20))
        assert dropped
        context.stopping.set()
        await asyncio.wait_for(job, BOUND_S)
        await context.log.broker.close()

    asyncio.run(main())


def test_a_killed_job_loses_no_result(kafka: str, namespace: str, tmp_path: Path) -> None:
    job = (assemble_groups.SERVICE, kafka, namespace, tmp_path)

    async def main() -> None:
        log = a_kafka_context(kafka, namespace, tmp_path).log
        await apply(log)
        await send_results(log, 0, 2_000)
        process = start_job(*job)
        try:
            await read_groups(log, 1)  # in the middle of them
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = start_job(*job)
            await send_results(log, 2_000, 100)
            assert set(await read_groups(log, 2_100)) == set(range(2_100))
            await wait_for_commit(log)
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0
        finally:
            process.kill()
            process.wait()
            await log.broker.close()

    asyncio.run(main())


def test_batches_are_made_as_groups_come_and_go_on_after_a_restart(
    kafka: str, namespace: str, tmp_path: Path
) -> None:
    async def main() -> None:
        context = a_kafka_context(kafka, namespace, tmp_path)
        await follow_and_recover(context)
        await context.log.broker.close()

    asyncio.run(main())


def test_a_new_job_fences_its_predecessor(kafka: str, namespace: str, tmp_path: Path) -> None:
    async def main() -> None:
        contexts = [a_kafka_context(kafka, namespace, tmp_path) for _ in range(2)]
        await give_way_to_a_successor(*contexts)
        for context in contexts:
            await context.log.broker.close()

    asyncio.run(main())
