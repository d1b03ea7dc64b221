"""The order of acknowledgements, and what a failure does to them. Faust itself: see integration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import DependencyError
from headrace.schemas.codec import Codec
from headrace.schemas.events import EVENTS, GroupClosed
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Outgoing, Partition, Position
from headrace.services.log.event_log import EventLog
from headrace.stream_jobs.assemble_groups import IN_FLIGHT, _GroupJob
from headrace.stream_jobs.groups import GroupAssembler
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.stream_jobs.test_groups import a_recipe, a_task, an_outcome

GENERATION = 5
RESULTS = "space.results.v1"


class HeldBroker:
    """Takes records, and makes them durable when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[Outgoing, asyncio.Future[Position]]] = []

    async def send(self, record: Outgoing) -> Position:
        durable: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        self.sent.append((record, durable))
        return await durable

    def deliver(self, index: int) -> None:
        record, durable = self.sent[index]
        durable.set_result(Position(Partition(record.topic, 0), index))


class Harness:
    """A job that reads `values` as the records of one partition."""

    def __init__(self, values: list[bytes], recipe: Recipe | None = None) -> None:
        self.broker: Any = HeldBroker()
        self.log = a_log(self.broker)
        self.generation = GENERATION
        self.acknowledged: list[int] = []
        self.taken = 0
        self.values = values
        assembler = GroupAssembler(recipe or a_recipe())
        self.job = _GroupJob(self.log, assembler, lambda: self.generation)

    async def events(self) -> AsyncIterator[Any]:
        for offset, value in enumerate(self.values):
            message = SimpleNamespace(
                topic=RESULTS,
                partition=0,
                offset=offset,
                timestamp=1.5,
                key=b"0",
                value=value,
                headers={"h": b"1"},
                generation_id=GENERATION,
            )
            self.taken += 1
            yield SimpleNamespace(
                message=message, ack=lambda offset=offset: self.acknowledged.append(offset)
            )

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def a_log(broker: Any) -> EventLog:
    codec = Codec()
    for schema_id, event_type in enumerate(EVENTS, 1):
        codec.register(event_type, schema_id)
    topics = Topics("space", ["default"], 2, ["t"])
    return EventLog(broker, topics, codec, MemoryRegistry(), "test")


def results(count: int) -> list[bytes]:
    log = a_log(None)
    return [
        log.outgoing(a_task([an_outcome(0), an_outcome(1, 0.0)], task=task)).value
        for task in range(count)
    ]


def test_results_are_acknowledged_in_order_once_their_groups_are_durable() -> None:
    async def main() -> None:
        harness = Harness(results(3))
        following = asyncio.ensure_future(harness.job.follow(harness.events()))
        await harness.settle()
        assert [record.topic for record, _ in harness.broker.sent] == [
            "space.groups.default.v1"
        ] * 3

        harness.broker.deliver(1)
        harness.broker.deliver(2)
        await harness.settle()
        assert harness.acknowledged == []

        harness.broker.deliver(0)
        await harness.settle()
        assert harness.acknowledged == [0, 1, 2]
        await following
        await harness.job.aclose()

    asyncio.run(main())


def test_what_is_no_event_is_parked_whole_and_the_stream_goes_on() -> None:
    async def main() -> None:
        harness = Harness([b"garbage", *results(1)])
        following = asyncio.ensure_future(harness.job.follow(harness.events()))
        await harness.settle()
        record, _ = harness.broker.sent[0]
        assert (record.topic, record.value) == ("space.dead-letters.v1", b"garbage")
        assert ("h", b"1") in record.headers

        assert harness.acknowledged == []
        harness.broker.deliver(0)
        await harness.settle()
        assert harness.acknowledged == [0]
        harness.broker.deliver(1)
        await following
        await harness.settle()
        assert harness.acknowledged == [0, 1]
        await harness.job.aclose()

    asyncio.run(main())


def test_after_a_failed_write_nothing_more_is_acknowledged() -> None:
    async def main() -> None:
        harness = Harness(results(3))
        following = asyncio.ensure_future(harness.job.follow(harness.events()))
        await harness.settle()
        harness.broker.deliver(0)
        harness.broker.sent[1][1].set_exception(DependencyError("no broker"))
        harness.broker.deliver(2)
        await harness.settle()

        assert harness.acknowledged == [0]
        with pytest.raises(DependencyError, match="no broker"):
            await harness.job.failed
        await following
        await harness.job.aclose()

    asyncio.run(main())


def test_a_result_that_can_not_be_handled_stops_the_job_before_it() -> None:
    here = "tests.unit.stream_jobs.test_groups"

    async def main() -> None:
        harness = Harness(results(2), a_recipe(advantage=f"{here}:one_value"))
        following = asyncio.ensure_future(harness.job.follow(harness.events()))
        await harness.settle()

        assert (harness.taken, harness.acknowledged, following.done()) == (1, [], False)
        with pytest.raises(Exception, match="gave 1 values"):
            await harness.job.failed
        following.cancel()
        await harness.job.aclose()

    asyncio.run(main())


def test_what_an_earlier_assignment_read_is_not_acknowledged() -> None:
    async def main() -> None:
        harness = Harness(results(1))
        await harness.job.follow(harness.events())
        await harness.settle()
        harness.generation += 1
        harness.broker.deliver(0)
        await harness.settle()
        assert harness.acknowledged == []
        await harness.job.aclose()

    asyncio.run(main())


def test_what_is_in_flight_is_bounded() -> None:
    async def main() -> None:
        harness = Harness(results(1) * (IN_FLIGHT + 5))
        following = asyncio.ensure_future(harness.job.follow(harness.events()))
        for _ in range(10):
            await harness.settle()
        assert len(harness.broker.sent) == IN_FLIGHT
        harness.broker.deliver(0)
        await harness.settle()
        assert len(harness.broker.sent) == IN_FLIGHT + 1
        following.cancel()
        await harness.job.aclose()

    asyncio.run(main())


def test_a_group_is_the_same_whenever_its_result_is_read() -> None:
    async def groups() -> list[GroupClosed]:
        harness = Harness(results(2))
        await harness.job.follow(harness.events())
        await harness.settle()
        found = [
            harness.log._codec.decode(GroupClosed, record.value)
            for record, _ in harness.broker.sent
        ]
        await harness.job.aclose()
        return found

    first = asyncio.run(groups())
    assert first == asyncio.run(groups())
    assert [group.ended for group in first] == [1_500, 1_500]
