"""The four hops of a turn with confluent-kafka alone: what a turn costs if nobody does anything.

`python -m tests.bench.bare relay SERVERS FROM TO PARTITIONS` passes records on to another topic.
`python -m tests.bench.bare turns SERVERS PREFIX` reads lines `LIVE TURNS`. It has so many records
go round so often in all, and prints the milliseconds of each turn as a line of JSON. Both use the
settings of Headrace's own clients. They decode nothing, keep no state, and have no event loop.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from headrace.services.kafka.client_settings import KafkaSettings

RECORD = b"x" * 400
"""About as much as a prompt, an answer, an action or an observation of the null episodes has."""
FEW = 4
"""Partitions of the topics of answers and observations."""
HOPS = ("prompts", "answers", "actions", "observations")


class Reader:
    """Reads all partitions of some topics."""

    def __init__(self, servers: str, topics: Mapping[str, int]) -> None:
        self._consumer = Consumer(KafkaSettings(servers, "bare").reader())
        self._consumer.assign(
            [TopicPartition(name, n, 0) for name, count in topics.items() for n in range(count)]
        )

    def records(self) -> Iterator[tuple[str, bytes]]:
        """Yields topic and key of each record that is there, after a wait for the first one."""
        wait_s = 1.0
        while (message := self._consumer.poll(wait_s)) is not None:
            error, topic, key = message.error(), message.topic(), message.key()
            if error is None:
                wait_s = 0.0
                assert topic is not None
                assert key is not None
                yield topic, key
            elif error.code() != KafkaError._PARTITION_EOF:
                raise RuntimeError(str(error))


def relay(servers: str, source: str, target: str, partitions: int) -> None:
    """Never returns."""
    reader = Reader(servers, {source: partitions})
    producer = Producer(KafkaSettings(servers, "bare").producer())
    print("ready", flush=True)
    while True:
        for _, key in reader.records():
            producer.produce(target, RECORD, key)
        producer.poll(0)


def turns(servers: str, prefix: str) -> None:
    """Has records go round as stdin says, until it ends."""
    prompts, answers, actions, observations = (f"{prefix}.{hop}" for hop in HOPS)
    reader = Reader(servers, {answers: FEW, observations: FEW})
    producer = Producer(KafkaSettings(servers, "bare").producer())
    print("ready", flush=True)
    for line in sys.stdin:
        live, left = map(int, line.split())
        began: dict[bytes, float] = {}
        took: list[float] = []

        def begin(key: bytes, began: dict[bytes, float] = began) -> None:
            began[key] = time.perf_counter()
            producer.produce(prompts, RECORD, key)

        for number in range(live):
            begin(b"%d" % number)
        started = time.perf_counter()
        while len(took) < left:
            for topic, key in reader.records():
                if topic == answers:
                    producer.produce(actions, RECORD, key)
                    continue
                took.append(1_000 * (time.perf_counter() - began.pop(key)))
                if len(took) + len(began) < left:
                    begin(key)
            producer.poll(0)
        print(json.dumps([time.perf_counter() - started, took]), flush=True)


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    if kind == "relay":
        relay(given[0], given[1], given[2], int(given[3]))
    else:
        turns(given[0], given[1])
