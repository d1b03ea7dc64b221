"""What a guest that floods does to the hops of a run, with the quota of the table and without.

A hop is a record of 1 KiB from one client of a principal to another one, 50 a second. Meanwhile a
guest offers ten times its quota, from a process of its own, to another topic of the same broker.
The broker, both clients of the run and the guest share the machine's cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.services.kafka.access.acl_bindings import create_acls
from headrace.services.kafka.access.client_quotas import change_quotas
from headrace.services.kafka.broker import Permission
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.namespace.access_table import ACCESS
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.report import Figure
from tests.guarded_stack import guarded_stack, properties_of

RUN, GUEST = "run", "guest"
QUOTAS = ACCESS["guest"].quotas
OFFERED = 10 * QUOTAS["producer_byte_rate"]
ROUNDS = 4
"""The three cases take turns, because other load of the machine changes."""
HOPS, WARM_UP, PAUSE_S = 250, 50, 0.02
"""In each round."""
SETTLE_S = 12.0
"""The broker counts over 10 s before a quota has its whole effect."""


async def quotas(_: ClusterConfig, scale: float) -> list[Figure]:
    """Hops alone, with a guest at ten times its quota, and with one that has no quota."""
    hops = max(30, round(HOPS * scale))
    with (
        TemporaryDirectory(prefix="headrace-bench-") as folder,
        pytest.MonkeyPatch.context() as patch,
        guarded_stack(Path(folder), patch, [RUN, GUEST]) as (stack, servers),
    ):
        owner = KafkaSettings(stack.bootstrap_servers, "bench")
        admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
        for made in admin.create_topics([NewTopic(RUN, 1), NewTopic(GUEST, 4)]).values():
            made.result(30)
        may = ((RUN, RUN, "READ"), (RUN, RUN, "WRITE"), (GUEST, GUEST, "WRITE"))
        create_acls(owner, [Permission(f"User:{who}", "TOPIC", what, do) for who, what, do in may])
        time.sleep(1)
        alone, limited, free = list[float](), list[float](), list[float]()
        for _round in range(ROUNDS):
            alone += latencies(servers, hops)
            await change_quotas(owner, {GUEST: QUOTAS})
            with flooding(servers):
                limited += latencies(servers, hops)
            await change_quotas(owner, {GUEST: dict.fromkeys(QUOTAS)})
            with flooding(servers):
                free += latencies(servers, hops)
    quiet = _p99(alone)
    flood = f"hop, a guest offers {OFFERED / 2**20:.0f} MiB/s"
    return [
        Figure("hop, no guest", text(alone), note="p50 and p99, in ms"),
        *(
            Figure(f"{flood}, {name}", text(found), note=f"p99 {_p99(found) / quiet:.2f} times")
            for name, found in (("with its quota", limited), ("without a quota", free))
        ),
    ]


def _p99(found: list[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


def text(found: list[float]) -> str:
    """The median and the 99th percentile, in milliseconds."""
    return f"{1_000 * statistics.median(found):.1f} / {1_000 * _p99(found):.1f}"


@contextmanager
def flooding(servers: str) -> Iterator[None]:
    """A guest floods meanwhile, since some seconds."""
    command = [sys.executable, "-m", "tests.bench.flood", servers, GUEST, GUEST, str(OFFERED)]
    with subprocess.Popen(command) as process:
        try:
            time.sleep(SETTLE_S)
            assert process.poll() is None
            yield
        finally:
            process.kill()


def latencies(servers: str, hops: int) -> list[float]:
    """How long each hop takes, in seconds."""
    settings = KafkaSettings(servers, "bench", properties_of(RUN))
    producer, consumer = Producer(settings.producer()), Consumer(settings.reader())
    end = consumer.get_watermark_offsets(TopicPartition(RUN, 0), 10.0)[1]
    consumer.assign([TopicPartition(RUN, 0, end)])
    taken = list[float]()
    for _ in range(WARM_UP + hops):
        sent = time.perf_counter()
        producer.produce(RUN, b"x" * 1_024)
        producer.poll(0)
        while (message := consumer.poll(30.0)) is not None and message.error() is not None:
            pass  # The end of the partition.
        assert message is not None
        taken.append(time.perf_counter() - sent)
        time.sleep(PAUSE_S)
    consumer.close()
    assert producer.flush(10) == 0
    return taken[WARM_UP:]
