"""Reading whole topics: from where, to where, and when a reader has caught up."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from headrace.errors import RecordsLost
from headrace.schemas.events import Event
from headrace.schemas.topics import POLICIES
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import TAIL, Back, CaughtUp, Start, follow_events
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
        places: dict[Partition, Start] = {
            RUNS_PARTITION: "first",
            TOPICS.partition(POLICIES): 0,
        }
        assert await read(bench.log, places) == [CaughtUp()]

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

        assert await first_offset("tail") == 10
        assert await first_offset("first") == 5
        assert await first_offset(20) == 20
        with pytest.raises(RecordsLost, match="offsets 2 to 4"):
            await first_offset(2)

    run(test)
