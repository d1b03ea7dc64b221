"""Connections to an MCP server, with limits that the library's own connections lack."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from headrace.services.processes import parent

EXIT_S = 0.5
"""Seconds that a server has to end after its input ended."""

CHUNK_BYTES = 64 * 1024


@asynccontextmanager
async def by_command(
    command: Sequence[str], environment: Mapping[str, str], most: int
) -> AsyncIterator[Any]:
    """Start a server as a child process. Messages are lines on its input and output.

    A line has at most `most` bytes. The server and the processes that it started end with this
    context, and with this process.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", parent.__file__, str(os.getpid()), *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=most,
        env={**get_default_environment(), **environment},
        start_new_session=True,
    )
    try:
        async with _piped(process) as streams:
            yield streams
    finally:
        await _end(process)


@asynccontextmanager
async def by_url(url: str, headers: Mapping[str, str], most: int) -> AsyncIterator[Any]:
    """Connect to a server by Streamable HTTP. A message has at most `most` bytes."""
    client = httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers},
        transport=_Bounded(most),
        timeout=None,  # every call has its own limit
    )
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=most) as streams,
    ):
        yield streams


@asynccontextmanager
async def _piped(process: asyncio.subprocess.Process) -> AsyncIterator[Any]:
    """Carry messages between a process's pipes and the streams that the library takes."""
    heard, reading = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    writing, said = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [asyncio.create_task(_hear(process, heard)), asyncio.create_task(_say(process, said))]
    try:
        yield reading, writing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (heard, reading, writing, said):
            stream.close()


async def _hear(process: asyncio.subprocess.Process, heard: Any) -> None:
    """Pass on each line. The stream ends if the server is gone, or a line is too long."""
    assert process.stdout is not None
    with suppress(anyio.BrokenResourceError, ValueError, OSError):
        async with heard:
            while line := await process.stdout.readline():
                await heard.send(_message(line))


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _say(process: asyncio.subprocess.Process, said: Any) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        async for message in said:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Give a server a moment to end by itself, then kill it and all that it started."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(EXIT_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    with suppress(TimeoutError):  # a process that left the group may hold the pipe
        async with asyncio.timeout(EXIT_S):
            while await process.stdout.read(CHUNK_BYTES):
                pass
    await process.wait()


class _Bounded(httpx2.AsyncHTTPTransport):
    """Ends an answer that is too long. In streams of events, each event has the limit instead."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _CountedStream(response.stream, self._most)
        return response


class _CountedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream = stream
        self._left = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            self._left -= len(chunk)
            if self._left < 0:
                raise httpx2.ReadError("the answer is too long")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
