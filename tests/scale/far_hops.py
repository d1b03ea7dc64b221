"""`python -m tests.scale.far_hops`: what a hop takes behind a link of 300 ms one way.

The clients are real, with the settings of the product (`services/kafka/client_settings.py`). It
measures how long a producer behind the link waits until a record is durable, and how long after it
was durable a consumer behind the link has a record that was written at home.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.services.kafka.client_settings import KafkaSettings
from tests.bench.report import machine
from tests.chaos.servers import Cluster
from tests.scale.two_regions import DELAY_S, LINK_BYTES_PER_S

TOPIC, PARTITIONS = "hops", 16
SECONDS = 20.0


def acknowledged(servers: str, per_s: float, partitions: int, count: int = 1) -> list[float]:
    """Returns how long each record took until it was durable. So many are written a second, by
    `count` producers that share the partitions."""
    producers = [Producer(KafkaSettings(servers, "hops").producer()) for _ in range(count)]
    taken: list[float] = []
    chance = Random(0)

    def done(began_s: float, error: object, _: Message) -> None:
        assert error is None, error
        taken.append(time.monotonic() - began_s)

    def send(records: int) -> None:
        began_s = time.monotonic()
        for number in range(records):
            while time.monotonic() < began_s + number / per_s:
                for producer in producers:
                    producer.poll(0.005 / count)
            partition = chance.randrange(partitions)
            producers[partition % count].produce(
                TOPIC,
                bytes(2_000),
                partition=partition,
                on_delivery=partial(done, time.monotonic()),
            )
        for producer in producers:
            producer.flush(30)

    send(4 * PARTITIONS)  # The first records also wait for connections and ids.
    taken.clear()
    send(int(per_s * SECONDS))
    return taken


def read(servers: str, direct: str, wait_ms: int) -> list[float]:
    """Returns how long after it was durable each record was read. Two come in a second."""
    settings = KafkaSettings(servers, "hops", {"fetch.wait.max.ms": str(wait_ms)})
    producer = Producer(KafkaSettings(direct, "home").producer())
    taken: list[float] = []
    durable: dict[bytes, float] = {}
    chance = Random(1)
    with closing(Consumer(settings.reader())) as consumer:
        parts = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        ends = [consumer.get_watermark_offsets(one, timeout=10)[1] for one in parts]
        for part, end in zip(parts, ends, strict=True):
            part.offset = end
        consumer.assign(parts)
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            consumer.poll(0.05)
        next_s, number = time.monotonic(), 0
        until_s = next_s + 2 * SECONDS
        while time.monotonic() < until_s:
            if time.monotonic() >= next_s:
                key = str(number).encode()
                producer.produce(TOPIC, b"", key, partition=chance.randrange(PARTITIONS))
                producer.flush(10)
                durable[key] = time.monotonic()
                next_s, number = time.monotonic() + chance.expovariate(2.0), number + 1
            message = consumer.poll(0.005)
            if message is not None and message.error() is None:
                found = message.key()
                assert isinstance(found, bytes)
                taken.append(time.monotonic() - durable[found])
    return taken


async def main() -> None:
    """Starts a broker, and prints a table."""
    with TemporaryDirectory(prefix="headrace-hops-") as folder:
        cluster = Cluster(Path(folder), 1)
        try:
            await cluster.start()
            admin = AdminClient({"bootstrap.servers": cluster.direct})
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(30)
            proxy = cluster.brokers[0].proxy
            proxy.delay_s, proxy.bytes_per_s = DELAY_S, LINK_BYTES_PER_S
            far = cluster.bootstrap_servers
            for per_s, partitions, count in (
                (2.0, 16, 1),
                (100.0, 4, 1),
                (100.0, 16, 1),
                (100.0, 16, 4),
            ):
                taken = await asyncio.to_thread(acknowledged, far, per_s, partitions, count)
                name = f"{per_s:g} records/s to {partitions} partitions, producers: {count}"
                _print(f"durable, {name}", taken)
            for wait_ms in (100, 500, 5_000):
                taken = await asyncio.to_thread(read, far, cluster.direct, wait_ms)
                _print(f"read, fetch.wait.max.ms = {wait_ms}", taken)
        finally:
            await cluster.close()
    print(machine())


def _print(name: str, taken: list[float]) -> None:
    print(f"{name}: p50 {median(taken):.2f} s, p99 {quantiles(taken, n=100)[98]:.2f} s", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
