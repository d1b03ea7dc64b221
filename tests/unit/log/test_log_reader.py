"""Reading whole topics: from where, to where, and when a reader has caught up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest

from headrace.errors import RecordsLost
from headrace.schemas.events import Event
from headrace.schemas.topics import POLICIES
from headrace.services.kafka.broker import Outgoing, Partition, Reader
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import (
    TAIL,
    WHOLE,
    Back,
    CaughtUp,
    Patience,
    Start,
    Tail,
    follow_events,
    read_events,
    read_records,
)
from tests.memory.memory_reading import MemoryReader
from tests.unit.log.log_bench import RUNS_PARTITION, TOPICS, Bench, run, started


async def read(log: EventLog, starts: dict[Partition, Start]) -> list[Delivery[Any] | CaughtUp]:
    """What a reader yields up to CaughtUp."""
    items: list[Delivery[Any] | CaughtUp] = []
    reader = follow_events(log, starts)
    stream = aiter(reader)
    while CaughtUp() not in items:
        items.append(await anext(stream))
    await reader.aclose()
    return items


def test_a_beginning_that_is_deleted_while_it_is_looked_up_is_looked_up_again() -> None:
    async def test(bench: Bench) -> None:
        for number in range(8):
            await bench.log.send(started(number))
        ends = bench.broker.ends

        starts: dict[int, Start] = {3: "first", 5: Back(7)}
        for gone, start in starts.items():

            async def expire(*args: Any, before: int = gone, **options: Any) -> Any:
                found = await ends(*args, **options)
                bench.cluster.expire(RUNS_PARTITION, before)  # as retention may, before it is read
                return found

            with patch.object(bench.broker, "ends", expire):
                (first, *_) = await read(bench.log, {RUNS_PARTITION: start})
            assert isinstance(first, Delivery)
            assert first.offset == gone
            # What was asked for by its offset is lost, and that is said.
            with pytest.raises(RecordsLost, match=f"offsets 2 to {gone - 1}"):
                await read(bench.log, {RUNS_PARTITION: 2})

    run(test)


@pytest.mark.parametrize(("gone", "left"), [(3, 5), (8, 0)])
def test_a_beginning_that_is_deleted_before_it_is_read_is_looked_up_again(
    gone: int, left: int
) -> None:
    async def test(bench: Bench) -> None:
        for number in range(8):
            await bench.log.send(started(number))
        make_reader = bench.broker.reader

        def reader_that_is_slow() -> Reader:
            reader = make_reader()
            assign = reader.assign

            async def assign_and_wait(positions: Mapping[Partition, int]) -> None:
                await assign(positions)
                bench.cluster.expire(RUNS_PARTITION, gone)

            return cast("Reader", Mock(wraps=reader, assign=assign_and_wait))

        with patch.object(bench.broker, "reader", reader_that_is_slow):
            found = await read(bench.log, {RUNS_PARTITION: "first"})
            assert len(found) == left + 1
            with pytest.raises(RecordsLost, match="offsets 2 to"):
                await read(bench.log, {RUNS_PARTITION: 2})

    run(test)


def test_a_reader_says_once_that_it_has_caught_up_and_goes_on() -> None:
    async def test(bench: Bench) -> None:
        for number in range(2):
            await bench.log.send(started(number))
        await bench.put(b"garbage")
        reader = follow_events(bench.log, {RUNS_PARTITION: "first"})
        found: list[Event | CaughtUp] = []
        async for item in reader:
            found.append(item if isinstance(item, CaughtUp) else item.event)
            if isinstance(item, CaughtUp):
                await bench.log.send(started(2))
            if len(found) == 4:
                break
        await reader.aclose()
        assert found == [started(0), started(1), CaughtUp(), started(2)]

    run(test)


def test_a_reader_of_nothing_has_caught_up_at_once() -> None:
    async def test(bench: Bench) -> None:
        starts: dict[Partition, Start] = {
            RUNS_PARTITION: "first",
            TOPICS.partition(POLICIES): 0,
        }
        assert await read(bench.log, starts) == [CaughtUp()]

    run(test)


def test_a_tail_begins_shortly_before_the_end_and_first_at_what_is_kept() -> None:
    async def test(bench: Bench) -> None:
        for number in range(TAIL + 10):
            await bench.log.send(started(number))
        bench.cluster.expire(RUNS_PARTITION, 5)

        async def first_offset(start: Start) -> int:
            first = (await read(bench.log, {RUNS_PARTITION: start}))[0]
            assert isinstance(first, Delivery)
            return first.offset

        assert await first_offset(Tail()) == 10
        assert await first_offset(Tail(3)) == 7
        assert await first_offset(Tail(1_000)) == 5
        assert await first_offset("first") == 5
        assert await first_offset(20) == 20
        with pytest.raises(RecordsLost, match="offsets 2 to 4"):
            await first_offset(2)

    run(test)


def test_a_range_is_read_to_its_end_and_no_further() -> None:
    async def test(bench: Bench) -> None:
        for number in range(8):
            await bench.log.send(started(number))
        bench.cluster.expire(RUNS_PARTITION, 3)

        async def offsets(first: int, end: int) -> list[int]:
            found = []
            async for record in read_records(bench.broker, {RUNS_PARTITION: (first, end)}):
                found.append(record.offset)
                await bench.log.send(started(8))
            return found

        assert await offsets(0, 5) == [3, 4]
        assert await offsets(*WHOLE) == [3, 4, 5, 6, 7, 8, 9]  # Not what came meanwhile.
        assert await offsets(0, 3) == []
        assert await offsets(10**6, 10**6 + 1) == []

    run(test)


def test_partitions_that_end_together_are_given_up_together() -> None:
    """A reader takes 14 ms for that: a hundred partitions one by one took 1.4 s."""

    async def test(bench: Bench) -> None:
        every = [partition for topic in TOPICS for partition in topic.all_partitions()]
        assert len(every) > 50
        for at in every:
            await bench.broker.send(Outgoing(at.topic, b"key", b"", partition=at.number))
        given_up: list[int] = []
        unassign = MemoryReader.unassign

        async def noted(reader: MemoryReader, partitions: Sequence[Partition]) -> None:
            given_up.append(len(partitions))
            await unassign(reader, partitions)

        with patch.object(MemoryReader, "unassign", noted):
            async with aclosing(read_records(bench.broker, dict.fromkeys(every, WHOLE))) as records:
                assert {record.partition async for record in records} == set(every)
        assert len(given_up) < len(every) / 5

    run(test)


def test_a_sole_writers_reader_waits_for_open_transactions() -> None:
    async def test(bench: Bench) -> None:
        state = bench.cluster.state
        epoch = state.fence("other")
        state.begin("other", epoch, [bench.log.outgoing(started(0))])
        await bench.log.send(started(1))
        asyncio.get_running_loop().call_later(0.05, state.abort, "other", epoch)
        whole = {RUNS_PARTITION: WHOLE}
        assert [one async for one in read_events(bench.log, whole)] == []
        deliveries = read_events(bench.log, whole, include_uncommitted=True)
        assert [delivery.event async for delivery in deliveries] == [started(1)]

    run(test)


def test_reading_that_takes_long_reports_its_progress() -> None:
    async def test(bench: Bench) -> None:
        for number in range(5):
            await bench.log.send(started(number))
        reports: list[str] = []
        clock = iter([0.0, 1.0, 2.5, 2.5, 3.0, 4.0, 5.0, 5.0])
        patience = Patience(reports.append, lambda: next(clock))
        async with aclosing(
            read_records(bench.broker, {RUNS_PARTITION: WHOLE}, patience)
        ) as records:
            assert len([record async for record in records]) == 5
        assert reports == [f"reading {RUNS_PARTITION.topic}: {done} of 5" for done in (2, 5)]

    run(test)
