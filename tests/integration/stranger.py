"""Sends a record with a header whose name is not UTF-8, which most clients can't.

`python -m tests.integration.stranger SERVERS TOPIC VALUE_IN_HEX`
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from aiokafka import AIOKafkaProducer  # type: ignore[import-untyped]


class NotText(str):
    """A name whose bytes are not UTF-8. Only aiokafka's Python code asks it for them."""

    __slots__ = ()

    def encode(self, *_: Any) -> bytes:
        return b"\xff"


async def send_unreadable_header(servers: str, topic: str, value: bytes) -> None:
    """Does so in a process of its own, whose aiokafka runs without its compiled code."""
    stranger = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.integration.stranger", servers, topic, value.hex()),
        env={**os.environ, "AIOKAFKA_NO_EXTENSIONS": "1"},
    )
    assert await stranger.wait() == 0


async def _send(servers: str, topic: str, value: bytes) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    await producer.send_and_wait(topic, value, headers=[(NotText("a"), b"1")])
    await producer.stop()


if __name__ == "__main__":
    asyncio.run(_send(sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])))
