"""Clients that want to harm the gateway: it answers the others, and its memory is bounded."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from headrace.services.agent.gateway import server as server_module
from headrace.services.agent.gateway.chat_session import ChatSession
from headrace.services.agent.gateway.episode_queue import Keys
from headrace.services.agent.gateway.server import BODY_BYTES, GatewayServer
from tests.unit.agent.gateway.test_chat_session import converse, user

BOUND_S = 60.0
HELLO = {"model": "policy", "messages": [user("hello")]}


def against(harm: Callable[[GatewayServer, str, Keys], Awaitable[None]], **options: Any) -> None:
    """Harms a gateway, then plays as a well-behaved client, who must be served."""

    async def serve(session: ChatSession) -> None:
        server = GatewayServer(**options)
        url = await server.start("127.0.0.1", 0)
        try:
            with server.admitting(session) as keys:
                async with asyncio.timeout(BOUND_S):
                    await harm(server, url, keys)
                    assert await post(url, keys.chat, json.dumps(HELLO).encode()) == 200
        finally:
            await server.aclose()

    converse(serve, max_turns=100)


async def post(
    url: str, key: str, body: bytes, path: str = "/chat/completions", **more: str
) -> int:
    headers = {"Authorization": f"Bearer {key}", **more}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{url}/chat/completions", data=io.BytesIO(body)) as response,
    ):
        return response.status


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_idle_connections_are_bounded_and_leave_no_file_open() -> None:
    before = files()

    async def harm(server: GatewayServer, url: str, keys: Keys) -> None:
        port = int(url.rpartition(":")[2].partition("/")[0])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        # Whoever comes too late is hung up on; the others may stay and say nothing.
        hung_up = [asyncio.create_task(reader.read()) for reader, _ in idle]
        while sum(task.done() for task in hung_up) < 136:
            await asyncio.sleep(0.01)
        done, waiting = await asyncio.wait(hung_up, timeout=0.2)
        assert (len(done), len(waiting)) == (136, 64)
        for _, writer in idle:
            writer.close()
        await asyncio.wait(waiting)
        while server._runner.server.connections:
            await asyncio.sleep(0.01)

    against(harm, connections=64)
    assert files() <= before


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b" " * BODY_BYTES, 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"messages": [' + b"[]," * 1_000_000 + b"[]]}", 400),
        (gzip.compress(json.dumps(HELLO).encode()), 400),
        (b"x" * (BODY_BYTES + 1), 413),
    ],
    ids=["spaces", "lists", "objects", "values", "compressed", "large"],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, status: int) -> None:
    async def harm(_: GatewayServer, url: str, keys: Keys) -> None:
        more = {"Content-Encoding": "gzip"} if body.startswith(b"\x1f") else {}
        assert await post(url, keys.chat, body, **more) == status

    against(harm)


def test_a_compressed_body_is_not_decompressed() -> None:
    bomb = gzip.compress(bytes(64 << 20))

    async def harm(_: GatewayServer, url: str, keys: Keys) -> None:
        answers = [post(url, keys.chat, bomb, **{"Content-Encoding": "gzip"}) for _ in range(32)]
        assert set(await asyncio.gather(*answers)) == {400}

    against(harm)


def test_few_large_bodies_are_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held, most = 0, 0
    answer = GatewayServer._answer

    async def counting(self: GatewayServer, session: ChatSession, http: Any) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        try:
            return await answer(self, session, http)
        finally:
            held -= 1

    monkeypatch.setattr(server_module, "LARGE_BODIES", 2)
    monkeypatch.setattr(GatewayServer, "_answer", counting)

    async def harm(_: GatewayServer, url: str, keys: Keys) -> None:
        large = json.dumps({**HELLO, "user": "x" * (2 << 20)}).encode()
        answers = await asyncio.gather(*(post(url, keys.chat, large) for _ in range(12)))
        assert set(answers) == {200}

    against(harm)
    assert most == 2
