"""What clients that want to harm a gateway do to it: stalls of its loop, memory and open files.

The gateway is a process of its own with one episode. After each attack it must answer a
well-behaved client, and five seconds later it has as few files open as before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from subprocess import PIPE
from typing import Any

import aiohttp

from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.report import Figure

IDLE, BODIES, NAMES = 1_000, 64, 1_000_000
LARGE = 16 << 20
LARGEST = 4 << 20
FILES_S = 5.0
ANSWER_S = 60.0
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}


class Victim:
    """A gateway, and what it says of itself."""

    def __init__(self, process: subprocess.Popen[str], http: aiohttp.ClientSession) -> None:
        self._process = process
        self._http = http
        self._given = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def seen(self) -> dict[str, Any]:
        """The longest stall, the most memory and the open files since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seen: dict[str, Any] = json.loads(self._line())
        return seen

    async def post(self, body: bytes, path: str = "chat/completions", key: str = "chat") -> int:
        """The status of an answer, or 0 if the gateway hung up before it had the whole body."""
        headers = {"Authorization": f"Bearer {self._given[key]}"}
        try:
            async with self._http.post(
                f"{self._given['url']}/{path}", data=body, headers=headers
            ) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0

    async def idle(self, stack: AsyncExitStack) -> None:
        """Connects, says nothing, and stays until the stack ends."""
        port = int(self._given["url"].rpartition(":")[2].partition("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(writer.close)


async def idle(victim: Victim) -> str:
    """A thousand connections that say nothing for two seconds."""
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(victim.idle(stack) for _ in range(IDLE)))
        answered = await victim.post(json.dumps(HELLO).encode())
        await asyncio.sleep(2.0)
    return f"meanwhile a client got {answered}"


async def bodies(victim: Victim, size: int) -> str:
    """Large requests at the same time."""
    empty = len(json.dumps({**HELLO, "user": ""}))
    body = json.dumps({**HELLO, "user": "x" * (size - empty)}).encode()
    return _statuses(await asyncio.gather(*(victim.post(body) for _ in range(BODIES))))


async def names(victim: Victim, count: int) -> str:
    """A report with very many names of rewards."""
    body = json.dumps({"rewards": {f"{number:x}": 1 for number in range(count)}}).encode()
    return _statuses([await victim.post(body, "episode/reward", "report")])


async def texts(victim: Victim) -> str:
    """Whitespace of 1 MB, and brackets 100,000 deep, sixteen times each."""
    made = [b" " * 1_000_000, b"[" * 100_000, b'{"a":' * 100_000]
    return _statuses(await asyncio.gather(*(victim.post(body) for body in made * 16)))


def _statuses(found: list[int]) -> str:
    return ", ".join(f"{found.count(status)} x {status}" for status in sorted(set(found)))


ATTACKS: dict[str, Callable[[Victim], Awaitable[str]]] = {
    f"{IDLE:,} idle connections": idle,
    f"{BODIES} bodies of 16 MiB": lambda victim: bodies(victim, LARGE),
    f"{BODIES} bodies of 4 MiB": lambda victim: bodies(victim, LARGEST),
    f"{NAMES:,} names of rewards": lambda victim: names(victim, NAMES),
    "300,000 names of rewards": lambda victim: names(victim, 300_000),
    "whitespace and brackets": texts,
}


async def hostile(_: ClusterConfig, scale: float) -> list[Figure]:
    """Each attack, and what it did. The scale changes nothing."""
    figures = []
    async with _victim() as victim:
        assert await victim.post(json.dumps(HELLO).encode()) == 200
        await asyncio.sleep(1.0)
        before = victim.seen()
        for name, attack in ATTACKS.items():
            said = await attack(victim)
            seen = victim.seen()
            assert await victim.post(json.dumps(HELLO).encode()) == 200, "it answers no more"
            await asyncio.sleep(FILES_S)
            left = victim.seen()["files"] - before["files"]
            grown = (seen["bytes"] - before["bytes"]) / 2**20
            figures += [
                Figure(f"{name}: longest stall", f"{1_000 * seen['stall_s']:.0f} ms", "250 ms"),
                Figure(f"{name}: memory", f"{grown:+.0f} MiB", "256 MiB", note=said),
                Figure(f"{name}: files left open after 5 s", str(left), "0"),
            ]
    return figures


@asynccontextmanager
async def _victim() -> AsyncIterator[Victim]:
    command = [sys.executable, "-m", "tests.bench.hostile_gateway"]
    async with AsyncExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True))
        stack.callback(process.kill)
        # Each request has a connection of its own, which ends with it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=limit)
        )
        yield Victim(process, http)
