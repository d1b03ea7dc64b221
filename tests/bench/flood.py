"""Floods a topic as one user, for `quotas.py`.

`python -m tests.bench.flood SERVERS TOPIC USER BYTES_S` offers so many bytes a second until it is
killed. What its own queue has no room for is dropped.
"""

from __future__ import annotations

import contextlib
import sys
import time

from confluent_kafka import Producer

from tests.guarded_stack import properties_of

BODY = b"x" * 65_536
QUEUE_KB = 4_096


def main(servers: str, topic: str, user: str, bytes_s: float) -> None:
    """Never returns."""
    producer = Producer(
        {
            "bootstrap.servers": servers,
            "log_level": 0,
            "queue.buffering.max.kbytes": QUEUE_KB,
            **properties_of(user),
        }
    )
    pause_s, due = len(BODY) / bytes_s, time.monotonic()
    while True:
        with contextlib.suppress(BufferError):
            producer.produce(topic, BODY)
        due = max(due + pause_s, time.monotonic() - 1)
        producer.poll(max(0.0, due - time.monotonic()))
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
