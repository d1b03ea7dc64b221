"""How a Worker takes over many partitions at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from headrace.schemas.codec import Codec
from headrace.schemas.events import Event, GenerationRequested, Sampling
from headrace.schemas.topics import ACTIONS, OBSERVATIONS, PROMPTS, Topic, Topics
from headrace.services.kafka.broker import Committed, Outgoing, Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.worker.worker import COMMIT_INTERVAL_S, Worker
from tests.memory.memory_broker import MemoryBroker, MemoryCluster
from tests.memory.memory_registry import MemoryRegistry
from tests.simulation import virtual_time
from tests.unit.worker.test_worker import Notebook, action, observation

GROUP = "unit.assignment"
SIDES: Mapping[str, Topic[Any]] = {"one": ACTIONS, "two": OBSERVATIONS}
"""Policy, whose prompts are a main topic, to the topic of that one's side partitions."""


def prompt(number: int, policy: str) -> GenerationRequested:
    return GenerationRequested(
        task=number,
        sample=0,
        call="1",
        policy=policy,
        text="go",
        sampling=Sampling(max_tokens=2),
        expires_at=1,
        digest=bytes(16),
    )


class Holder(Notebook):
    """A shard that holds the prompts that it is told to, and notes all else as answers."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        task = delivery.event.task
        if isinstance(delivery.event, GenerationRequested):
            if task in self._held:
                self.context.hold(delivery)
            self.note(task)
        else:
            self.note(f"answer {task}")


class Taken:
    """A cluster with so many partitions a topic, and one worker that is assigned all of them."""

    def __init__(self, partitions: int) -> None:
        self.topics = Topics("unit", tuple(SIDES), partitions, pool_partitions=partitions)
        self.mains = [
            Partition(self.topics.name(PROMPTS, policy), number)
            for policy in SIDES
            for number in range(partitions)
        ]
        self.cluster = MemoryCluster()
        self.broker = self.cluster.client("test")
        self.requests = 0
        """Requests of workers to the cluster."""
        self.shards: dict[Partition, Holder] = {}
        self._registry = MemoryRegistry()

    async def apply(self) -> None:
        await self.broker.create_topics(
            {placed.name: (placed.partitions, {}) for placed in self.topics}
        )
        await self.broker.commit_first(GROUP, self.mains)

    def side(self, main: Partition) -> Partition:
        policy = self.topics.by_name(main.topic).policy
        return self.topics.partition(SIDES[str(policy)], number=main.number)

    def log_of(self, broker: MemoryBroker) -> EventLog:
        codec = Codec()
        self._registry.prepare(codec, self.topics)
        return EventLog(broker, self.topics, codec, self._registry, "test")

    async def write(self, main: Partition, *numbers: int) -> None:
        """Writes prompts to a main partition."""
        policy = str(self.topics.by_name(main.topic).policy)
        await self._write(main, [prompt(number, policy) for number in numbers])

    async def answer(self, main: Partition, *numbers: int) -> None:
        """Writes events to the side partition of a main partition."""
        side = self.side(main)
        make = action if side.topic == self.topics.name(ACTIONS) else observation
        await self._write(side, [make(number) for number in numbers])

    async def _write(self, at: Partition, events: Sequence[Event]) -> None:
        for event in events:
            record = self.log_of(self.broker).outgoing(event)
            await self.broker.send(
                Outgoing(at.topic, record.key, record.value, record.headers, at.number)
            )

    @asynccontextmanager
    async def worker(
        self, held: Mapping[Partition, set[int]] | None = None, **settings: Any
    ) -> AsyncGenerator[None]:
        """Runs a worker, which has all partitions when the block begins, and kills it."""
        client, assigned = self.cluster.client("worker"), asyncio.Event()
        call = client._process.call

        async def counted(*arguments: Any) -> Any:
            self.requests += 1
            return await call(*arguments)

        client._process.call = counted  # type: ignore[assignment, method-assign]

        def make(context: Any) -> Holder:
            shard = Holder(context, (held or {}).get(context.partition, set()))
            self.shards[context.partition] = shard
            return shard

        worker = Worker(
            self.log_of(client),
            topics=[self.topics.name(PROMPTS, policy) for policy in SIDES],
            consumer_group=GROUP,
            make_shard=make,
            stopping=asyncio.Event(),
            side_partitions=lambda main: {self.side(main): "committed"},
            changed=assigned.set,
            **settings,
        )
        running = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(60):
                await assigned.wait()
            yield
        finally:
            client.kill()
            running.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await running

    async def commits(self) -> dict[Partition, Committed]:
        return await self.broker.committed(GROUP, self.mains)


def run(partitions: int, test: Callable[[Taken], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        taken = Taken(partitions)
        await taken.apply()
        await test(taken)

    virtual_time.run(main)


@pytest.mark.parametrize("partitions", [1, 64])
def test_the_requests_of_an_assignment_do_not_grow_with_its_partitions(partitions: int) -> None:
    async def test(taken: Taken) -> None:
        async with taken.worker():
            # It joins, asks for the commits and for the ends, and assigns the side partitions.
            assert taken.requests == 4
            assert list(taken.shards) == taken.mains

    run(partitions, test)


def test_an_owner_counts_itself_in_each_partition_before_it_works() -> None:
    async def test(taken: Taken) -> None:
        async with taken.worker(count_deaths=True):
            for shard in taken.shards.values():
                await shard.until("caught up")
            counted = Committed(0, '{"at":[0],"owners":1}')
            assert await taken.commits() == dict.fromkeys(taken.mains, counted)

    run(3, test)


def test_each_partition_of_several_topics_continues_at_its_own_commit() -> None:
    async def test(taken: Taken) -> None:
        for number, main in enumerate(taken.mains):
            await taken.answer(main, *range(number))
        async with taken.worker({main: {at} for at, main in enumerate(taken.mains)}):
            for number, main in enumerate(taken.mains):
                await taken.shards[main].until("caught up")
                await taken.write(main, *range(number + 1))
                await taken.shards[main].until(number)
                await taken.answer(main, number)
            await asyncio.sleep(2 * COMMIT_INTERVAL_S)
        expected = {main: Committed(at, f"[{at}]") for at, main in enumerate(taken.mains)}
        assert await taken.commits() == expected

        async with taken.worker():
            for number, main in enumerate(taken.mains):
                shard = taken.shards[main]
                await shard.until("caught up")
                assert set(shard.story[:2]) == {number, f"answer {number}"}
                assert shard.story[2:] == ["caught up"]

    run(3, test)
