"""An engine that says only what a test has it say."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.services.processes.docker.docker_engine import DockerEngine

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

UPGRADED = (
    b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\n"
    b"Connection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
)
OLD = b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.docker.raw-stream\r\n\r\n"
"""As an engine answers that doesn't upgrade."""
EXEC = "POST /containers/[^/]+/exec"
START = "POST /exec/[^/]+/start"
INSPECT = "GET /exec/[^/]+/json"
VERSION = "GET /version"
PING = "GET /_ping"
BOUND_S = 60.0


def says(value: Any, status: int = 200) -> Answer:
    """Answers with JSON."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    return answer


def streams(*parts: bytes, head: bytes = UPGRADED, ends: bool = True) -> Answer:
    """Answers a command's start: each part in a packet of its own, the first with the headers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number, part in enumerate(parts):
            writer.write(part if number else head + part)
            await writer.drain()
            await asyncio.sleep(0.005)
        if not ends:
            await hangs(reader, writer)
        writer.close()

    return answer


def counts(size: int) -> Answer:
    """Answers a command's start, reads its input, and writes how much of it were zeros."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(UPGRADED)
        given = await reader.readexactly(size)
        writer.write(frame(str(given.count(0)).encode()))
        writer.close()

    return answer


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says nothing more, until the client is gone."""
    await reader.read()


def frame(text: bytes, stream: int = 1) -> bytes:
    """As the engine frames what a command writes."""
    return bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text


class FakeEngine:
    """What was asked. Answers are by patterns of method and path: the first that fits."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self.answers = {
            **answers,
            VERSION: answers.get(VERSION, says({"ApiVersion": "1.41"})),
            EXEC: answers.get(EXEC, says({"Id": "run"})),
            INSPECT: answers.get(INSPECT, says({"ExitCode": 0, "Running": False})),
            PING: says("OK"),
        }
        self.asked: list[str] = []
        self.writers: set[asyncio.StreamWriter] = set()

    @property
    def open(self) -> int:
        """Connections."""
        return len(self.writers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path = head.decode().split()[:2]
                if length := re.search(rb"(?i)content-length: (\d+)", head):
                    await reader.readexactly(int(length[1]))
                asked = f"{method} {re.sub(r'^/v[0-9.]+', '', path).partition('?')[0]}"
                self.asked.append(asked)
                fitting = (a for p, a in self.answers.items() if re.fullmatch(p, asked))
                await next(fitting)(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.remove(writer)
            writer.close()


@asynccontextmanager
async def fake(
    folder: Path,
    answers: Mapping[str, Answer],
    *,
    tcp: bool = False,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[FakeEngine, DockerEngine]]:
    """An engine that answers so, and ours that speaks to it: by a Unix socket, TCP or TLS."""
    made, path = FakeEngine(answers), folder / "engine.sock"
    if tcp or tls:
        server = await asyncio.start_server(made.serve, "127.0.0.1", ssl=tls)
        engine = DockerEngine(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    else:
        server = await asyncio.start_unix_server(made.serve, path)
        engine = DockerEngine(f"unix://{path}")
    try:
        yield made, engine
    finally:
        await engine.aclose()
        server.close()
        for writer in made.writers:
            writer.close()
        await until(lambda: made.open == 0)


Test = Callable[[FakeEngine, DockerEngine], Coroutine[Any, Any, None]]


def on(folder: Path, answers: Mapping[str, Answer], test: Test, **how: Any) -> None:
    """Runs a test on such an engine."""

    async def main() -> None:
        async with asyncio.timeout(BOUND_S), fake(folder, answers, **how) as (made, engine):
            await test(made, engine)

    asyncio.run(main())


async def until(true: Callable[[], bool], bound_s: float = 10.0) -> None:
    """Waits until something holds."""
    async with asyncio.timeout(bound_s):
        while not true():
            await asyncio.sleep(0.01)


def engine_threads() -> int:
    """Threads of this process that make calls of an engine."""
    return sum(thread.name == "docker" for thread in threading.enumerate())


def descriptors() -> int:
    """File descriptors that this process has open."""
    return len(os.listdir("/proc/self/fd"))
