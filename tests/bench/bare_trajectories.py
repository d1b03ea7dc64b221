"""The records of `trajectories` with confluent-kafka alone: what a trajectory costs at least.

`python -m tests.bench.bare_trajectories NAME SERVERS PREFIX` is one of four processes:

- `produce` reads lines `COUNT`, and sends so many trajectories, their outcomes and results, each
  once the one before is durable. It prints the seconds that this took.
- `groups` sends a group for each result, and `batches` a batch for each 16 groups.
- `load` reads lines `COUNT`. It prints the time once it has read so many trajectories and all of
  their batches.

They use the settings of Headrace's clients, and records of the same size. They encode and decode
nothing, keep no state, and have no event loop.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import KafkaError, Message, Producer

from headrace.services.kafka.client_settings import GATHER_MS, KafkaSettings
from tests.bench.bare import Reader
from tests.bench.trajectories import BATCH, GROUP, GROUPS_A_BATCH

PARTITIONS = {"trajectories": 4, "outcomes": 4, "results": 4, "groups": 4, "batches": 1}
"""By topic, as a recipe has them."""
BYTES = {"trajectories": 8_500, "outcomes": 330, "results": 1_220, "groups": 920, "batches": 11_000}
"""Of a record and its headers, as `trajectories` sends them."""
UNDER_WAY = 512
"""Trajectories whose results are not durable yet, at most."""


class Sender:
    """Sends records of the right size."""

    def __init__(self, servers: str, prefix: str) -> None:
        self._prefix = prefix
        self._producer = Producer(KafkaSettings(servers, "bare").producer(GATHER_MS))
        self.durable = dict.fromkeys(PARTITIONS, 0)
        """How many records of each topic."""

    def send(self, topic: str, key: bytes) -> None:
        """Sends a record, and lets librdkafka report others."""
        value = bytes(BYTES[topic])
        self._producer.produce(f"{self._prefix}.{topic}", value, key, on_delivery=self._delivered)

    def wait(self, seconds: float) -> None:
        """Lets librdkafka report what is durable, after so long a wait for the first one."""
        self._producer.poll(seconds)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        topic, key = (message.topic() or "").removeprefix(f"{self._prefix}."), message.key()
        assert isinstance(key, bytes)
        self.durable[topic] += 1
        if topic == "trajectories":
            self.send("outcomes", key)
        elif topic == "outcomes" and self.durable[topic] % GROUP == 0:
            self.send("results", key)


def produce(servers: str, prefix: str) -> None:
    """Ends so many episodes as stdin says."""
    sender, sent = Sender(servers, prefix), 0
    print("ready", flush=True)
    for line in sys.stdin:
        began, last = time.perf_counter(), sent + int(line)
        while sender.durable["results"] * GROUP < last:
            while sent < min(last, sender.durable["results"] * GROUP + UNDER_WAY):
                sender.send("trajectories", b"%d" % (sent // GROUP))
                sent += 1
                sender.wait(0)
            sender.wait(0.1)
        print(time.perf_counter() - began, flush=True)


def gather(servers: str, prefix: str, source: str, target: str, each: int) -> None:
    """Sends a record for `each` records of another topic. Never returns."""
    reader = Reader(servers, {f"{prefix}.{source}": PARTITIONS[source]})
    sender, read = Sender(servers, prefix), 0
    print("ready", flush=True)
    while True:
        for _, key in reader.records():
            read += 1
            if read % each == 0:
                sender.send(target, key)
        sender.wait(0)


def load(servers: str, prefix: str) -> None:
    """Reads so many trajectories as stdin says, and their batches."""
    topics = ("trajectories", "batches")
    reader = Reader(servers, {f"{prefix}.{topic}": PARTITIONS[topic] for topic in topics})
    trajectories = batches = last = 0
    print("ready", flush=True)
    for line in sys.stdin:
        last += int(line)
        while trajectories < last or batches * BATCH < last:
            for topic, _ in reader.records():
                if topic.endswith(".batches"):
                    batches += 1
                else:
                    trajectories += 1
        print(time.time(), flush=True)


if __name__ == "__main__":
    kind, servers, prefix = sys.argv[1:]
    if kind == "produce":
        produce(servers, prefix)
    elif kind == "load":
        load(servers, prefix)
    elif kind == "groups":
        gather(servers, prefix, "results", "groups", 1)
    else:
        gather(servers, prefix, "groups", "batches", GROUPS_A_BATCH)
