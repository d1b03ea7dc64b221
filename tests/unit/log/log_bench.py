"""A log in memory to test with, and what lies in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.schemas.codec import Codec
from headrace.schemas.events import RunStateEntered
from headrace.schemas.topics import RUNS, Topics
from headrace.services.kafka.broker import Outgoing, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_records
from tests.memory.memory_broker import MemoryBroker, MemoryCluster
from tests.memory.memory_registry import MemoryRegistry

TOPICS = Topics("unit", ("default",), 2)
RUNS_PARTITION = TOPICS.partition(RUNS)


def started(number: int = 0) -> RunStateEntered:
    return RunStateEntered(namespace=f"run-{number}", state="started", digest=bytes(32))


class Bench:
    """A log, and a registry of which it knows only its own schemas."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.broker = self.cluster.client("test")
        self.registry = MemoryRegistry()
        self.log = self.log_of(self.broker, "writer-1")

    def log_of(self, broker: MemoryBroker, source: str) -> EventLog:
        codec = Codec()
        self.registry.prepare(codec, TOPICS)
        return EventLog(broker, TOPICS, codec, self.registry, source)

    async def records(self, partition: Partition) -> list[Record]:
        """All records of a partition."""
        return [record async for record in read_records(self.broker, {partition: WHOLE})]

    async def put(self, value: bytes, **fields: Any) -> Record:
        """Writes any bytes to `runs`, and reads them back."""
        await self.broker.send(Outgoing(RUNS_PARTITION.topic, b"key", value, **fields))
        return (await self.records(RUNS_PARTITION))[-1]


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
        await test(bench)
        await bench.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))
