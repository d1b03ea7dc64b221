"""Clients that want to harm the gateway: it answers the others, and its memory is bounded."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
import logging
import os
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from headrace.schemas.events import (
    Event,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
)
from headrace.services.agent.gateway import server as server_module
from headrace.services.agent.gateway.chat_session import IN_FLIGHT, ChatSession
from headrace.services.agent.gateway.episode_queue import Keys
from headrace.services.agent.gateway.server import BODY_BYTES, GatewayServer
from tests.unit.agent.gateway.test_chat_session import converse, user
from tests.unit.agent.gateway.test_program import Chatting

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

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


@pytest.mark.parametrize("body", [b"x" * (BODY_BYTES + 1), b"[" * BODY_BYTES], ids=["413", "400"])
def test_a_refused_body_takes_no_memory_until_the_garbage_collector_runs(body: bytes) -> None:
    async def harm(server: GatewayServer, url: str, keys: Keys) -> None:
        await post(url, keys.chat, body)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(8):
                await post(url, keys.chat, body)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
        assert taken < 2 * BODY_BYTES

    against(harm)


@pytest.mark.parametrize("asked", [{"model": "\1" * 500_000}, {"x" * 3_000_000: 1}])
def test_a_refusal_repeats_little_of_the_request(asked: dict[str, Any]) -> None:
    """Otherwise a client that does not read it keeps several MiB in memory."""

    async def harm(_: GatewayServer, url: str, keys: Keys) -> None:
        body = json.dumps({**HELLO, **asked}).encode()
        reader, writer = await begin(url, keys.chat, len(body), body)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
        assert head[9:10] == b"4"
        assert int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]) < 20_000

    against(harm)


def test_a_compressed_body_is_not_decompressed() -> None:
    bomb = gzip.compress(bytes(64 << 20))

    async def harm(_: GatewayServer, url: str, keys: Keys) -> None:
        answers = [post(url, keys.chat, bomb, **{"Content-Encoding": "gzip"}) for _ in range(32)]
        assert set(await asyncio.gather(*answers)) == {400}

    against(harm)


LARGE = json.dumps({**HELLO, "user": "x" * (2 << 20)}).encode()


def test_few_large_bodies_are_read_at_once_and_one_of_an_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, most = 0, 0
    read = server_module._body

    async def counting(http: Any) -> bytes:
        nonlocal held, most
        held += 1
        most = max(most, held)
        try:
            return await read(http)
        finally:
            held -= 1

    monkeypatch.setattr(server_module, "LARGE_BODIES", 2)
    monkeypatch.setattr(server_module, "_body", counting)

    async def serve(session: ChatSession) -> None:
        async with gateway(session, 4) as (url, keys, _):
            one = await asyncio.gather(*(post(url, keys[0], LARGE) for _ in range(6)))
            assert (set(one), most) == ({200}, 1)
            all_of_them = await asyncio.gather(*(post(url, key, LARGE) for key in 3 * keys))
            assert (set(all_of_them), most) == ({200}, 2)

    converse(serve, max_turns=100)


@asynccontextmanager
async def gateway(
    session: ChatSession, count: int
) -> AsyncIterator[tuple[str, list[str], list[ChatSession]]]:
    """A gateway with several sessions of one episode: its URL, and their chat keys."""
    server = GatewayServer()
    url = await server.start("127.0.0.1", 0)
    sessions = [session]
    sessions += [ChatSession(session._episode, session._dialect) for _ in range(count - 1)]
    with ExitStack() as stack:
        keys = [stack.enter_context(server.admitting(one)).chat for one in sessions]
        async with asyncio.timeout(BOUND_S):
            yield url, keys, sessions
    await server.aclose()


async def begin(url: str, key: str, length: int, body: bytes = b"") -> Connection:
    """Begins a request of a body of `length` bytes, and sends only `body`."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def holds(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not true():
            await asyncio.sleep(0.01)


def test_bodies_that_never_come_keep_no_other_episode_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "LARGE_BODIES", 2)

    async def serve(session: ChatSession) -> None:
        async with gateway(session, 2) as (url, (hostile, other), _):
            stalled = [await begin(url, hostile, len(LARGE)) for _ in range(8)]
            async with asyncio.timeout(BOUND_S / 2):
                assert await post(url, other, LARGE) == 200
            for _, writer in stalled:
                writer.close()

    converse(serve, max_turns=100)


def test_one_episode_has_few_bodies_in_memory() -> None:
    async def harm(server: GatewayServer, url: str, keys: Keys) -> None:
        stalled = [await begin(url, keys.chat, 100) for _ in range(80)]
        refused = [asyncio.create_task(reader.readline()) for reader, _ in stalled]
        while sum(task.done() for task in refused) < 80 - IN_FLIGHT:
            await asyncio.sleep(0.01)
        done, waiting = await asyncio.wait(refused, timeout=0.2)
        assert all(b" 429 " in task.result() for task in done)
        assert len(waiting) == IN_FLIGHT
        for _, writer in stalled:
            writer.close()
        await asyncio.wait(waiting)

    against(harm)


def test_a_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(session: ChatSession) -> None:
        async with gateway(session, 1) as (url, keys, _):
            _, writer = await begin(url, keys[0], 100_000, b"x")
            await holds(lambda: bool(session._open))
            writer.close()
            await session.drain()

    converse(serve)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_body_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its client would never be gone, and its episode could not end."""
    monkeypatch.setattr(server_module, "BODY_S", 0.2)

    async def serve(session: ChatSession) -> None:
        async with gateway(session, 1) as (url, keys, _):
            reader, writer = await begin(url, keys[0], 100)
            assert b" 408 " in await reader.readline()
            writer.close()
            await session.drain()

    converse(serve)


def test_a_client_whose_large_body_waits_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LARGE_BODIES", 1)

    async def serve(session: ChatSession) -> None:
        async with gateway(session, 2) as (url, keys, (_, waiting)):
            _, writer = await begin(url, keys[0], len(LARGE))
            await holds(session.uploading.locked)
            asking = asyncio.create_task(post(url, keys[1], LARGE))
            await holds(waiting.uploading.locked)
            await asyncio.sleep(0.05)
            assert waiting.silent_s == 0.0
            draining = asyncio.create_task(waiting.drain())
            await asyncio.sleep(0)
            assert not draining.done()  # what it asks for belongs to the trajectory
            writer.close()
            assert await asking == 200
            await draining

    converse(serve, max_turns=100)


class Silent(Chatting):
    """Keeps no prompt, and answers none before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Event] = []

    async def send(self, event: Event) -> Ref:
        if not isinstance(event, GenerationRequested):
            return await super().send(event)
        self.asked.append(event.model_copy(update={"chat": ""}))
        return Ref(topic="t", partition=0, offset=1, digest=bytes(16))

    def answer_all(self) -> None:
        assert self.run is not None
        for event in self.asked:
            answer = self.answer(event)
            assert answer is not None
            self.run.on_answer(answer)


def test_what_was_said_takes_no_memory_while_the_policy_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does a request whose answer takes minutes keep the large ones of others waiting."""
    monkeypatch.setattr(server_module, "LARGE_BODIES", 1)
    world, count, size = Silent(), 12, 2_000_000

    async def serve(session: ChatSession) -> None:
        async with gateway(session, 1) as (url, keys, _):
            tracemalloc.start()
            try:
                bodies = [
                    json.dumps({**HELLO, "messages": [user(f"{n}" + "x" * size)]}).encode()
                    for n in range(count)
                ]
                asking = [asyncio.create_task(post(url, keys[0], body)) for body in bodies]
                await holds(lambda: len(world.asked) == count)
                gc.collect()
                # The client has two copies of each body.
                taken = tracemalloc.get_traced_memory()[0] - 2 * sum(map(len, bodies))
            finally:
                tracemalloc.stop()
            world.answer_all()
            assert set(await asyncio.gather(*asking)) == {200}
            assert taken < size * count / 4

    converse(serve, world, max_turns=100, max_tokens=10_000)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_ends(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "DELIVER_S", 0.3)

    class Long(Chatting):
        def answer(self, event: Event) -> GenerationCompleted | ObservationRecorded | None:
            found = super().answer(event)
            if isinstance(found, GenerationCompleted):
                return found.model_copy(update={"text": "x" * (32 << 20)})
            return found

    world = Long()

    async def serve(session: ChatSession) -> None:
        async with gateway(session, 1) as (url, keys, _):
            body = json.dumps({**HELLO, "stream": stream}).encode()
            _, writer = await begin(url, keys[0], len(body), body)
            await holds(lambda: bool(session._episode.turns))
            await session.drain()
            writer.close()

    converse(serve, world)
    (turn,) = world.trajectory().turns
    assert not turn.trainable
