"""What only Kafka does: brokers that die, offsets that go, callbacks from another thread."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.errors import DependencyError, HeadraceError, RecordsLost, UsageError
from headrace.infra import local
from headrace.infra.local.detached import ProcessId, free_port, wait_for_exit
from headrace.schemas.topics import MAX_RECORD_BYTES, TASKS
from headrace.services.kafka import admin, convert, fetcher, poller, producer
from headrace.services.kafka.broker import (
    MAX_MESSAGE_BYTES,
    Committed,
    End,
    Outgoing,
    Partition,
    Position,
    Reader,
    Record,
    Subscription,
)
from headrace.services.kafka.client_settings import KafkaSettings, Properties
from headrace.services.kafka.consumer import KafkaSubscription
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.kafka.poller import Poller
from headrace.services.kafka.producer import Sender
from headrace.services.kafka.scarcity import ProcessorWait
from headrace.services.namespace.apply import topic_configuration
from tests.integration.stranger import send_unreadable_header

LIMIT_S = 90


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test; none of the client's threads may outlive it."""
    before = set(threading.enumerate())
    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if name.startswith("kafka")] == []


async def topic(broker: KafkaBroker, namespace: str, partitions: int = 1) -> list[Partition]:
    """A new topic's partitions."""
    name = f"{namespace}.things.v1"
    await broker.create_topics({name: (partitions, {})})
    return [Partition(name, number) for number in range(partitions)]


async def read_records(source: Reader | Subscription, count: int) -> list[Record]:
    """So many records, read one batch after the other."""
    records: list[Record] = []
    while len(records) < count:
        records += [item for item in await source.read() if isinstance(item, Record)]
    return records


class Member:
    """A member of a group that notes what it is told."""

    def __init__(self) -> None:
        self.won: dict[Partition, Committed] = {}
        self.lost: list[Partition] = []
        self.last: Mapping[Partition, Committed] = {}
        self.arrived = asyncio.Event()

    async def on_assigned(self, partitions: Mapping[Partition, Committed]) -> None:
        self.won.update(partitions)
        self.arrived.set()

    async def on_revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        self.lost += partitions
        return {} if lost else {at: self.last[at] for at in partitions if at in self.last}


def test_ends_wait_for_a_broker_that_does_not_know_its_partition_yet(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "UNKNOWN_S", LIMIT_S)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        try:
            partition = Partition(f"{namespace}.things.v1", 0)
            asking = asyncio.create_task(broker.ends([partition]))
            done, _ = await asyncio.wait({asking}, timeout=1.0)
            assert not done
            await topic(broker, namespace)
            assert await asking == {partition: (0, 0)}
        finally:
            await broker.close()

    drive(main)


def test_no_broker_is_told_within_five_seconds() -> None:
    """In one of three tries: the machine may stand still for seconds."""

    async def seconds() -> float:
        servers = f"127.0.0.1:{free_port()}"
        broker = KafkaBroker(KafkaSettings(servers, "test"))
        begun = monotonic()
        with pytest.raises(DependencyError, match=f"{servers}.*headrace up.*--bootstrap-servers"):
            await broker.check()
        await broker.close()
        return monotonic() - begun

    async def main() -> None:
        for _ in range(3):
            if (took := await seconds()) < 6:
                return
        assert took < 6

    drive(main)


@pytest.mark.parametrize("name", ["isolation.level", "acks", "group.id"])
def test_properties_that_the_contract_rests_on_are_not_for_users(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        KafkaSettings("127.0.0.1:1", "test", {name: "1"})


def test_an_unknown_property_is_named() -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings("127.0.0.1:1", "test", {"no.such.thing": "1"}))
        with pytest.raises(UsageError, match=r"no\.such\.thing"):
            await broker.check()
        await broker.close()

    drive(main)


def test_a_cancelled_send_harms_nobody(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        sends = [
            asyncio.create_task(broker.send(Outgoing(partition.topic, b"k", b"%d" % number)))
            for number in range(100)
        ]
        await asyncio.sleep(0)
        for send in sends[::2]:
            send.cancel()
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, Position] * 50
        assert (await broker.send(Outgoing(partition.topic, b"k", b"last"))).offset == 100
        await broker.close()

    drive(main)


def test_only_gathered_records_wait_for_others(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is 20 s here, so a gathered record is not sent before the broker object closes."""
    monkeypatch.setattr(producer, "GATHER_MS", 20_000)
    monkeypatch.setattr(producer, "CLOSE_S", 0.1)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        record = Outgoing(partition.topic, b"k", b"gathered", gathered=True)
        gathered = asyncio.create_task(broker.send(record))
        await asyncio.sleep(0)
        assert (await broker.send(Outgoing(partition.topic, b"k", b"at once"))).offset == 0
        assert not gathered.done()
        await broker.close()
        with pytest.raises(DependencyError):
            await gathered

    drive(main)


def test_a_client_asks_for_the_leaders_of_the_topics_that_it_begins_to_read(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(consumer: Any, topics: set[str]) -> None:
        asked.extend(topics)
        convert.find_leaders(consumer, topics)

    for module in (poller, fetcher):
        monkeypatch.setattr(module, "find_leaders", note)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        position = await broker.send(Outgoing(partition.topic, b"key", b"value"))
        for _ in range(2):
            [record] = await broker.fetch([position])
            assert record.value == b"value"
        assert asked == [partition.topic]
        reader = broker.reader()
        await reader.assign({partition: 0})
        assert await reader.read()
        assert asked == 2 * [partition.topic]
        await broker.close()

    drive(main)


def test_gathered_records_keep_their_order(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        sends = (
            broker.send(Outgoing(partition.topic, b"k", b"%d" % n, gathered=True))
            for n in range(200)
        )
        positions = await asyncio.gather(*sends)
        assert [position.offset for position in positions] == list(range(200))
        await broker.close()

    drive(main)


@pytest.fixture
def crowding(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a process waits for a processor from now on, at once and however little it sends."""
    shares = [0.0]
    monkeypatch.setattr(ProcessorWait, "share", lambda _: shares[0])
    for name in ("LOOK_S", "CONNECT_S"):
        monkeypatch.setattr(producer, name, 0.0)
    for name in ("MANY", "MANY_GATHERED"):
        monkeypatch.setattr(producer, name, -1.0)
    return shares


@pytest.mark.parametrize("gathered", [False, True])
def test_records_keep_their_order_while_producers_change(
    kafka: str,
    namespace: str,
    crowding: list[float],
    monkeypatch: pytest.MonkeyPatch,
    gathered: bool,
) -> None:
    used: list[Sender] = []
    produce = Sender._produce

    def note(sender: Sender, *record: Any) -> bool:
        used.append(sender)
        crowding[0] = float(len(used) // 300 % 2)
        return produce(sender, *record)

    monkeypatch.setattr(Sender, "_produce", note)
    monkeypatch.setattr(producer, "CHANGE_S", 10.0)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        sends = []
        for number in range(3_000):
            patient = number % 3 > 0
            value = b"%d" % number
            record = Outgoing(partition.topic, b"k", value, gathered=gathered, patient=patient)
            sends.append(asyncio.create_task(broker.send(record)))
            if number % 10 == 0:
                await asyncio.sleep(0.001)
        positions = await asyncio.gather(*sends)
        assert [position.offset for position in positions] == list(range(3_000))
        changes = sum(one is not other for one, other in pairwise(used))
        assert changes >= 8
        await broker.close()

    drive(main)


@pytest.mark.parametrize(
    ("sends", "crowded"), [({"a": 200, "b": 200, "c": 200}, False), ({"a": 260, "b": 1}, True)]
)
def test_gathered_records_are_crowded_if_one_topic_has_many(
    kafka: str, monkeypatch: pytest.MonkeyPatch, sends: dict[str, int], crowded: bool
) -> None:
    """A request has records of one partition, so those of other topics don't come together."""
    monkeypatch.setattr(ProcessorWait, "share", lambda _: 1.0)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        broker.prepare_sends(gathered=True)
        sender = broker._senders[True]
        sender._sends.update(sends)
        sender._look(sender._looked_at + producer.LOOK_S)
        assert (sender._second is not None) == crowded
        await broker.close()

    drive(main)


def test_a_record_that_stays_does_not_hold_up_the_others(
    kafka: str, namespace: str, crowding: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second producer waits for 20 s here, so its record is on its way until it closes."""
    monkeypatch.setattr(producer, "CROWDED_MS", 20_000)
    monkeypatch.setattr(producer, "CLOSE_S", 0.1)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        record = Outgoing(partition.topic, b"k", b"v")
        assert (await broker.send(record)).offset == 0
        crowding[0] = 1.0
        sends = [asyncio.create_task(broker.send(record))]
        await asyncio.sleep(0.01)
        crowding[0] = 0.0
        began = monotonic()
        sends += [asyncio.create_task(broker.send(record)) for _ in range(5)]
        sender = broker._senders[False]
        assert sender._second is not None
        while sender._second.under_way < 6:
            assert monotonic() - began < 10
            await asyncio.sleep(0.01)
        assert monotonic() - began >= producer.CHANGE_S
        await broker.close()
        outcomes = await asyncio.gather(*sends, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DependencyError}
        assert sender._second.uncertain

    drive(main)


def test_after_a_failure_the_producer_stays_the_same(
    kafka: str, namespace: str, crowding: list[float]
) -> None:
    """What has failed may become durable, and would overtake what another producer has sent."""

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        record = Outgoing(partition.topic, b"k", b"v")
        await broker.send(record)
        sender = broker._senders[False]
        sender.uncertain = True
        crowding[0] = 1.0
        assert [(await broker.send(record)).offset for _ in range(20)] == list(range(1, 21))
        assert sender._current is sender
        await broker.close()

    drive(main)


def test_a_second_producer_that_is_broken_gets_nothing(
    kafka: str, namespace: str, crowding: list[float]
) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        record = Outgoing(partition.topic, b"k", b"v")
        crowding[0] = 1.0
        await broker.send(record)
        sender = broker._senders[False]
        assert sender._second is not None
        sender._second._broken = DependencyError("it is fatal")
        crowding[0] = 0.0
        await broker.send(record)
        crowding[0] = 1.0
        assert [(await broker.send(record)).offset for _ in range(20)] == list(range(2, 22))
        await broker.close()

    drive(main)


def test_without_a_second_producer_the_first_one_goes_on(
    kafka: str,
    namespace: str,
    crowding: list[float],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise DependencyError("no more clients")

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        record = Outgoing(partition.topic, b"k", b"v")
        await broker.send(record)
        monkeypatch.setattr(producer, "Sender", fail)
        crowding[0] = 1.0
        assert [(await broker.send(record)).offset for _ in range(20)] == list(range(1, 21))
        await broker.close()

    drive(main)
    said = [record.getMessage() for record in caplog.records]
    assert said.count("records are sent without waiting for more: no more clients") == 1


@pytest.mark.parametrize(("share", "sends"), [(0.0, 200), (1.0, 5)])
def test_what_is_not_crowded_has_one_producer(
    kafka: str, namespace: str, share: float, sends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessorWait, "share", lambda _: share)
    monkeypatch.setattr(producer, "LOOK_S", 0.05)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        for _ in range(sends):
            await broker.send(Outgoing(partition.topic, b"k", b"v"))
            await asyncio.sleep(0.3 / sends)
        sender = broker._senders[False]
        assert sender._second is None
        await broker.close()

    drive(main)


def test_a_full_queue_delays_sends_and_keeps_their_order(kafka: str, namespace: str) -> None:
    async def main() -> None:
        properties = {"queue.buffering.max.messages": "10"}
        broker = KafkaBroker(KafkaSettings(kafka, "test", properties))
        [partition] = await topic(broker, namespace)
        sends = (broker.send(Outgoing(partition.topic, b"k", b"%d" % n)) for n in range(200))
        positions = await asyncio.gather(*sends)
        assert [position.offset for position in positions] == list(range(200))
        await broker.close()

    drive(main)


def test_a_record_too_large_and_an_unknown_topic_are_refused(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        with pytest.raises(HeadraceError, match="9000000 bytes"):
            await broker.send(Outgoing(partition.topic, b"k", bytes(9_000_000)))
        soon = {"topic.metadata.propagation.max.ms": "500"}
        hasty = KafkaBroker(KafkaSettings(kafka, "test", soon))
        with pytest.raises(DependencyError, match="apply the recipe"):
            await hasty.send(Outgoing(f"{namespace}.absent", b"k", b"v"))
        await hasty.close()
        await broker.close()

    drive(main)


def test_a_slow_reader_is_not_overrun_and_loses_nothing(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        partitions = await topic(broker, namespace, 2)
        count, value = 600, os.urandom(100_000)
        await asyncio.gather(
            *(broker.send(Outgoing(partitions[0].topic, b"%d" % n, value)) for n in range(count))
        )
        reader = broker.reader()
        await reader.assign(dict.fromkeys(partitions, 0))
        taken: dict[Partition, int] = dict.fromkeys(partitions, 0)
        largest = 0
        while sum(taken.values()) < count:
            items = await reader.read()
            largest = max(largest, len(items))
            for item in items:
                if isinstance(item, Record):
                    assert item.offset == taken[item.partition]
                    taken[item.partition] += 1
            await asyncio.sleep(0.3)  # Long enough for the hand-over to fill and be paused.
        assert largest < count / 2
        await broker.close()

    drive(main)


def test_a_place_that_retention_removed_is_told_with_what_is_there(
    kafka: str, namespace: str
) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        for number in range(10):
            await broker.send(Outgoing(partition.topic, b"k", b"%d" % number))
        await broker.commit_first("group", [partition])
        admin = AdminClient({"bootstrap.servers": kafka})
        [gone] = admin.delete_records([TopicPartition(partition.topic, 0, 6)]).values()
        await asyncio.wrap_future(gone)
        where = re.escape(f"{partition.topic}/0")
        with pytest.raises(RecordsLost, match=f"{where}: 3 records are lost, offsets 3 to 5: "):
            await broker.reader().assign({partition: 3})
        with pytest.raises(RecordsLost, match=f"{where}: .*offsets 10 to 10: .*ends at 10"):
            await broker.reader().assign({partition: 11})
        with pytest.raises(RecordsLost, match=f"{where}: 4 records are lost, offsets 2 to 5: "):
            await broker.fetch([Position(partition, 8), Position(partition, 2)])
        assert [record.value for record in await broker.fetch([Position(partition, 8)])] == [b"8"]
        member = Member()
        subscription = broker.subscribe(
            [partition.topic], "group", member.on_assigned, member.on_revoked
        )
        lost = (
            f"{where}: 6 records are lost, offsets 0 to 5: the consumer group group continues at 0"
        )
        with pytest.raises(RecordsLost, match=lost):
            await subscription.read()
        await broker.close()

    drive(main)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many records a fetcher has received, with how many requests. It stays current.

    The fetcher does not give partitions up because the machine stood still for a second.
    """
    monkeypatch.setattr(fetcher, "QUIET_S", 60.0)
    received: dict[str, int] = {}

    def note(text: str) -> None:
        statistics = json.loads(text)
        fetches = sum(one["req"]["Fetch"] for one in statistics["brokers"].values())
        received.update(records=statistics["rxmsgs"], fetches=fetches)

    def consumer_with_statistics(properties: Properties) -> Consumer:
        return Consumer({**properties, "statistics.interval.ms": 50, "stats_cb": note})

    monkeypatch.setattr(fetcher, "make_consumer", consumer_with_statistics)
    return received


async def send_large(broker: KafkaBroker, partitions: list[Partition], records: int) -> None:
    """Sends records of 100 kB, in turns to the partitions."""
    for number in range(records):
        at = partitions[number % len(partitions)]
        await broker.send(Outgoing(at.topic, b"k", bytes(100_000), partition=at.number))


def test_fetches_read_each_record_once_and_are_quiet_in_between(
    kafka: str, namespace: str, received: dict[str, int]
) -> None:
    """Each fetch needs one partition only, and goes on just behind an earlier one."""

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        partitions = await topic(broker, namespace, 2)
        await send_large(broker, partitions, 40)
        for offset in range(20):
            await broker.fetch([Position(partitions[offset % 2], offset)])
        assert broker._fetcher is not None
        async with asyncio.timeout(10):
            # Paused instead, they would go on up to a second late.
            while broker._fetcher._next:
                await asyncio.sleep(0.01)
        for pause_s in (2, 0, 0):  # Afterwards, statistics arrive.
            await broker.fetch([Position(partitions[0], 0)])
            await asyncio.sleep(pause_s)
        assert received["records"] <= 40 + 3 * 20
        assert received["fetches"] < 60, "idle, it would ask hundreds of times in 2 s"
        await broker.close()

    drive(main)


def test_fetches_that_find_all_in_the_cache_do_not_give_its_partition_up(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch, received: dict[str, int]
) -> None:
    monkeypatch.setattr(fetcher, "CACHE_BYTES", 6_000_000)
    monkeypatch.setattr(fetcher, "BATCH", 5)
    # Shorter than any broker needs to answer: what is under way is not given up meanwhile.
    monkeypatch.setattr(fetcher, "READ_AHEAD_S", 0.0001)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        await send_large(broker, [partition], 150)
        for offset in (0, 10, *range(11, 35)):
            await broker.fetch([Position(partition, offset)])
            await asyncio.sleep(0.5 if offset == 10 else 0)  # It reads half of the cache ahead.
        for offset in range(100, 150, 7):  # Meanwhile, statistics arrive.
            await broker.fetch([Position(partition, offset)])
            await asyncio.sleep(0.05)
        assert received["records"] < 185, "those that were read ahead are read again"
        await broker.close()

    drive(main)


def test_what_was_given_up_far_ahead_is_read_on_in_time(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One partition comes first. It does not fill the cache alone, and nothing of it is missed."""
    monkeypatch.setattr(fetcher, "AHEAD", 8)
    monkeypatch.setattr(fetcher, "BATCH", 5)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        first, second = await topic(broker, namespace, 2)
        for number in range(60):
            for at in (first, second):
                await broker.send(Outgoing(at.topic, b"k", b"%d" % number, partition=at.number))
        for offset in range(4):
            await broker.fetch([Position(first, offset)])
            await asyncio.sleep(0.05)
        assert broker._fetcher is not None
        assert 0 < len(broker._fetcher._cache) <= 8 + 2 * 5, "it reads on without end"
        for offset in range(4, 60, 2):
            wanted = [Position(at, offset + one) for at in (first, second) for one in (0, 1)]
            found = await broker.fetch(wanted)
            assert [record.value for record in found] == [b"%d" % one.offset for one in wanted]
        await broker.close()

    drive(main)


def test_records_that_no_fetch_needs_do_not_stop_the_reading_ahead(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch, received: dict[str, int]
) -> None:
    """No batch needs the trajectories of a dropped group. Here that is every second record."""
    monkeypatch.setattr(fetcher, "CACHE_BYTES", 2_000_000)
    monkeypatch.setattr(fetcher, "BATCH", 5)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        await send_large(broker, [partition], 60)
        for offset in range(0, 60, 2):
            await broker.fetch([Position(partition, offset)])
            await asyncio.sleep(0.02)
        await asyncio.sleep(2)
        for _ in range(2):  # Statistics arrive.
            await broker.fetch([Position(partition, 58)])
            await asyncio.sleep(0.1)
        assert received["fetches"] < 120, "idle, it would ask hundreds of times in 2 s"
        await broker.close()

    drive(main)


def test_a_fetch_starts_behind_records_that_retention_removed(kafka: str, namespace: str) -> None:
    """It would read on from the end of the fetch before, which is gone."""

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        for number in range(20):
            if number == 10:
                await broker.fetch([Position(partition, 9)])
            await broker.send(Outgoing(partition.topic, b"k", b"%d" % number))
        admin = AdminClient({"bootstrap.servers": kafka})
        [gone] = admin.delete_records([TopicPartition(partition.topic, 0, 15)]).values()
        await asyncio.wrap_future(gone)
        assert [one.value for one in await broker.fetch([Position(partition, 17)])] == [b"17"]
        await broker.close()

    drive(main)


def test_a_group_without_a_commit_asks_for_apply(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        member = Member()
        subscription = broker.subscribe(
            [partition.topic], namespace, member.on_assigned, member.on_revoked
        )
        with pytest.raises(DependencyError, match=r"no commit.*apply the recipe first"):
            await subscription.read()
        await broker.close()
        assert (member.won, member.lost) == ({}, [])

    drive(main)


def test_what_a_callback_raises_ends_the_reading(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        await broker.commit_first(namespace, [partition])
        member = Member()

        async def on_assigned(_: Mapping[Partition, Committed]) -> None:
            raise ZeroDivisionError("a handler's own")

        subscription = broker.subscribe(
            [partition.topic], namespace, on_assigned, member.on_revoked
        )
        with pytest.raises(ZeroDivisionError, match="a handler's own"):
            await subscription.read()
        await broker.close()
        assert member.lost == []

    drive(main)


def test_callbacks_may_pause_and_commit(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        partitions = await topic(broker, namespace, 2)
        await broker.commit_first(namespace, partitions)
        for partition in partitions:
            await broker.send(Outgoing(partition.topic, b"k", b"v", partition=partition.number))
        told = asyncio.Event()

        async def on_assigned(won: Mapping[Partition, Committed]) -> None:
            await subscription.pause([partitions[1]])
            await subscription.commit({partitions[0]: Committed(1)})  # Not held yet: left out.
            told.set()

        async def on_revoked(
            gone: Sequence[Partition], lost: bool
        ) -> Mapping[Partition, Committed]:
            await subscription.pause(gone)
            await subscription.commit({partitions[0]: Committed(1)})  # Not held any more.
            return {partitions[1]: Committed(1, "last word")}

        subscription = broker.subscribe([partitions[0].topic], namespace, on_assigned, on_revoked)
        assert [record.partition for record in await read_records(subscription, 1)] == [
            partitions[0]
        ]
        assert await broker.committed(namespace, partitions) == dict.fromkeys(
            partitions, Committed(0)
        )
        await subscription.resume([partitions[1]])
        assert [record.partition for record in await read_records(subscription, 1)] == [
            partitions[1]
        ]
        await subscription.close()
        assert told.is_set()
        assert await broker.committed(namespace, partitions) == {
            partitions[0]: Committed(0),
            partitions[1]: Committed(1, "last word"),
        }
        await broker.close()

    drive(main)


def test_a_closed_reader_has_no_thread_even_if_that_is_slow_to_end(
    kafka: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Poller._run

    def run_and_linger(poller: Poller) -> None:
        run(poller)
        time.sleep(0.5)

    monkeypatch.setattr(Poller, "_run", run_and_linger)

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        reader = broker.reader()
        await reader.assign({partition: 0})
        await reader.read()
        await broker.close()

    drive(main)


def test_closed_clients_leave_room_for_others(kafka: str, namespace: str) -> None:
    """A process can have at most 1,024 clients, so those that are closed must be forgotten."""

    def refuse(*_: object) -> None:
        raise DependencyError("no commit")

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        made: list[weakref.ref[Any]] = []
        for number in range(3):
            reader = broker.reader()
            await reader.assign({partition: 0})
            await reader.close()
            writer = await broker.fenced(f"{namespace}.writer-{number}")
            await writer.close()
            made += [weakref.ref(reader), weakref.ref(writer)]
        member = Member()
        for fails in (False, True):
            reading = broker.subscribe(
                [partition.topic], f"{namespace}.group", member.on_assigned, member.on_revoked
            )
            if fails:
                with pytest.raises(DependencyError, match="has no commit"):
                    await reading.read()
            await reading.close()
            assert isinstance(reading, KafkaSubscription)
            assert reading.closed, "it took longer to leave its group"
            # As an assignment amid the end: pytest keeps the line that is logged.
            reading._keep_error(refuse, reading.consumer, [])
            made.append(weakref.ref(reading))
        del reader, writer, reading
        last = broker.reader()
        # The event loop may still have a callback of one.
        async with asyncio.timeout(30):
            while gc.collect() >= 0 and any(one() is not None for one in made):
                await asyncio.sleep(0.05)
        await last.close()
        await broker.close()

    drive(main)


def test_a_writer_goes_on_after_a_write_that_failed(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        writer = await broker.fenced(f"{namespace}.writer")
        records = [Outgoing(partition.topic, b"k", b"%d" % number) for number in range(3)]
        positions = await writer.write(records)
        assert positions == [Position(partition, number) for number in range(3)]
        with pytest.raises(HeadraceError, match="MSG_SIZE_TOO_LARGE"):
            await writer.write([*records, Outgoing(partition.topic, b"k", bytes(9_000_000))])
        [after] = await writer.write([Outgoing(partition.topic, b"k", b"after")])
        reader = broker.reader()
        await reader.assign({partition: 0})
        seen: list[Record | End] = []
        while not any(isinstance(item, End) and item.offset > after.offset for item in seen):
            seen += await reader.read()
        values = [item.value for item in seen if isinstance(item, Record)]
        assert values == [b"0", b"1", b"2", b"after"]
        await broker.close()

    drive(main)


def test_the_largest_event_can_be_sent_and_the_largest_record_can_be_read(
    kafka: str, namespace: str
) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        name = f"{namespace}.things.v1"
        await broker.create_topics({name: (1, topic_configuration(TASKS))})
        headers = [("header", bytes(MAX_MESSAGE_BYTES - MAX_RECORD_BYTES - 2_000))]
        largest = Outgoing(name, b"k" * 1_000, os.urandom(MAX_RECORD_BYTES), headers)
        assert MAX_MESSAGE_BYTES - 2_000 < largest.size <= MAX_MESSAGE_BYTES
        await broker.send(largest)
        reader = broker.reader()
        await reader.assign({Partition(name, 0): 0})
        (record,) = await read_records(reader, 1)
        assert (record.value, record.headers) == (largest.value, headers)
        await broker.close()

    drive(main)


OFTEN = 100


def test_a_header_whose_name_is_not_text_ends_no_reader(kafka: str, namespace: str) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        [partition] = await topic(broker, namespace)
        # Python's bytecode calls otherwise what it has called often.
        for _ in range(OFTEN):
            await broker.send(Outgoing(partition.topic, b"k", b"before", [("name", b"1")]))
        await send_unreadable_header(kafka, partition.topic, b"value")
        await broker.send(Outgoing(partition.topic, b"k", b"after", [("name", b"1")]))
        reader = broker.reader()
        await reader.assign({partition: 0})
        read = (await read_records(reader, OFTEN + 2))[OFTEN:]
        fetched = await broker.fetch([Position(partition, OFTEN)])
        assert [(one.value, one.headers) for one in [*read, *fetched]] == [
            (b"value", []),
            (b"after", [("name", b"1")]),
            (b"value", []),
        ]
        await broker.close()

    drive(main)


def kill(pid: int) -> None:
    """kill -9, and waits for the end."""
    process = ProcessId.of(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_for_exit(process, 10)


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[local.LocalStack]:
    """A stack that a test may kill."""
    yield local.up(tmp_path, kafka_port=0, registry_port=0, owner_pid=os.getpid())
    local.down(tmp_path, wipe=True)


def test_a_killed_broker_comes_back_or_is_closed_without(
    own_stack: local.LocalStack, namespace: str
) -> None:
    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(own_stack.bootstrap_servers, "test"))
        [partition] = await topic(broker, namespace)
        await broker.commit_first(namespace, [partition])
        member = Member()
        subscription = broker.subscribe(
            [partition.topic], namespace, member.on_assigned, member.on_revoked
        )
        reader = broker.reader()
        await reader.assign({partition: 0})
        await broker.send(Outgoing(partition.topic, b"k", b"before"))
        await read_records(reader, 1)
        await read_records(subscription, 1)

        await asyncio.to_thread(kill, own_stack.kafka_pid)
        in_flight = [
            asyncio.create_task(broker.send(Outgoing(partition.topic, b"k", b"%d" % number)))
            for number in range(10)
        ]
        again = await asyncio.to_thread(local.up, own_stack.state)
        assert again.bootstrap_servers == own_stack.bootstrap_servers
        positions = await asyncio.gather(*in_flight)
        assert positions == [Position(partition, offset) for offset in range(1, 11)]
        values = [b"%d" % number for number in range(10)]
        assert [record.value for record in await read_records(reader, 10)] == values
        seen: dict[int, bytes | None] = {}
        while not seen.keys() >= set(range(1, 11)):  # From 0 again, if the session has run out.
            seen |= {record.offset: record.value for record in await read_records(subscription, 1)}
        assert [seen[offset] for offset in range(1, 11)] == values
        await subscription.commit({partition: Committed(11)})
        assert await broker.committed(namespace, [partition]) == {partition: Committed(11)}
        assert [record.value for record in await broker.fetch(positions)] == values

        writer = await broker.fenced(f"{namespace}.writer")
        await asyncio.to_thread(kill, again.kafka_pid)
        member.lost.clear()
        member.last = {partition: Committed(11)}
        unknown = asyncio.create_task(writer.write([Outgoing(partition.topic, b"k", b"never")]))
        lost = asyncio.create_task(broker.send(Outgoing(partition.topic, b"k", b"never")))
        await asyncio.sleep(0)
        begun = monotonic()
        await broker.close()
        assert monotonic() - begun < 8
        with pytest.raises(DependencyError, match="can't send"):
            await lost
        with pytest.raises(DependencyError, match=f"{namespace}.writer"):
            await unknown
        assert member.lost == [partition]

    drive(main)
