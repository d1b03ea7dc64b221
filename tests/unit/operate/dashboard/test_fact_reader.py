"""The reader of facts lets other requests have turns, however large the records are."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count

import pytest

from headrace.schemas.codec import Codec
from headrace.schemas.events import Event, ObservationRecorded
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.operate.dashboard.index.index_rows import Seen
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.fact_reader import TURN_BYTES, FactReader
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.operate.dashboard.test_run_index import RECIPE


class WatchedLog(EventLog):
    """Counts the records and the bytes that are decoded in each turn of the event loop."""

    turn = 0
    records: Counter[int]
    sizes: Counter[int]

    async def decode(self, record: Record) -> Delivery[Event]:
        self.records[self.turn] += 1
        self.sizes[self.turn] += len(record.value or b"")
        return await super().decode(record)

    async def count_turns(self) -> None:
        for self.turn in count():
            await asyncio.sleep(0)


@pytest.mark.parametrize(("records", "text_bytes"), [(12, 200_000), (400, 10)])
def test_other_requests_have_turns_between_records(records: int, text_bytes: int) -> None:
    async def main() -> None:
        broker, registry, codec = MemoryBroker(), MemoryRegistry(), Codec()
        topics = Topics("n", ("default",), 1)
        registry.prepare(codec, topics)
        log = WatchedLog(broker, topics, codec, registry, "test")
        log.records, log.sizes = Counter(), Counter()
        await broker.create_topics({one.name: (1, {}) for one in topics})
        index = RunIndex(RECIPE)
        for call in range(records):
            event = ObservationRecorded(
                task=0,
                sample=0,
                call=str(call),
                index=call,
                digest=bytes(16),
                text="x" * text_bytes,
            )
            ref = await log.send(event)
            at = Partition(ref.topic, ref.partition)
            index.on_event(event, Seen(at, ref.offset, 1.0, text_bytes))
        counting = asyncio.create_task(log.count_turns())
        facts, remarks = await FactReader(log).of_task(index, 0)
        counting.cancel()
        assert (len(facts), remarks) == (records, [])
        assert max(log.sizes.values()) < TURN_BYTES + text_bytes + 1_000
        assert max(log.records.values()) <= 101

    asyncio.run(main())
