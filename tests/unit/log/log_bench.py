"""A log in memory to test with, and what lies in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.schemas.codec import Codec
from headrace.schemas.events import RunStateEntered
from headrace.schemas.topics import RUNS, Topics
from headrace.services.kafka.broker import Outgoing, Partition, Record
from headrace.services.kafka.memory.memory_broker import MemoryBroker, MemoryCluster
from headrace.services.kafka.memory.memory_registry import MemoryRegistry
from headrace.services.log.event_log import EventLog

TOPICS = Topics("unit", ("default",), 2)
RUNS_PLACE = Partition(TOPICS.name(RUNS), 0)


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

    async def records(self, place: Partition) -> list[Record]:
        """All records of a partition."""
        end = (await self.broker.ends([place]))[place][1]
        reader = self.broker.reader()
        await reader.assign({place: 0})
        found: list[Record] = []
        while len(found) < end:
            found += [item for item in await reader.read() if isinstance(item, Record)]
        await reader.close()
        return found

    async def put(self, value: bytes, **fields: Any) -> Record:
        """Writes any bytes to `runs`, and reads them back."""
        await self.broker.send(Outgoing(RUNS_PLACE.topic, b"key", value, **fields))
        return (await self.records(RUNS_PLACE))[-1]


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
        await test(bench)
        await bench.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))
