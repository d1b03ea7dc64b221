"""Connections to an MCP server, with limits that the library's own connections lack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, jsonrpc_message_adapter

from headrace.errors import InfrastructureError
from headrace.services.env.http_environment import refusal
from headrace.services.processes.child_process import NEVER_ANSWERED, ChildProcess, LineTooLong

EXIT_S = 0.5
"""Seconds that a server has to end after its input has ended."""
SESSION = "mcp-session-id"
"""The header of requests that belong to a session of the server."""


class Refusals:
    """Why a server gave no message, which the library hides: an HTTP status, or how it ended."""

    def __init__(self) -> None:
        self.last: Exception | None = None
        """The failure of the newest request; None if the server answered it with a message."""

    async def note(self, response: httpx2.Response) -> None:
        """Note how a request ended."""
        if response.request.method != "POST":
            return
        status, url = response.status_code, str(response.request.url)
        if status < 400:
            self.last = None
        elif status == 404 and SESSION in response.request.headers:
            self.last = InfrastructureError("sandbox_lost", f"{url} has lost the session")
        elif _is_message(content := await response.aread()):
            self.last = None
        else:
            self.last = refusal(status, response.headers, content, url)


@asynccontextmanager
async def by_command(
    command: Sequence[str], environment: Mapping[str, str], most: int, refusals: Refusals
) -> AsyncIterator[Any]:
    """Start a server as a child process. Messages are lines on its input and output.

    A line has at most `most` bytes. The server and the processes that it started end when this
    context or this process ends.
    """
    async with aclosing(await ChildProcess.start(command, environment, limit=most)) as server:
        try:
            async with _piped(server, refusals) as streams:
                yield streams
        finally:
            server.stdin.close()
            await server.ends_within(EXIT_S)


@asynccontextmanager
async def by_url(
    url: str, headers: Mapping[str, str], most: int, refusals: Refusals
) -> AsyncIterator[Any]:
    """Connect to a server by Streamable HTTP. A message has at most `most` bytes."""

    async def bound(response: httpx2.Response) -> None:
        # We asked for none: decompression could multiply what the limit counts.
        coding = response.headers.get("content-encoding", "identity").lower()
        if coding != "identity":
            raise httpx2.ReadError(f"the answer is compressed ({coding}), which is not accepted")
        # In a stream of events, the library limits each event instead.
        streams = "text/event-stream" in response.headers.get("content-type", "")
        if not streams or response.status_code >= 400:
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream, most)

    client = httpx2.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers},
        transport=httpx2.AsyncHTTPTransport(),
        timeout=None,  # every call has its own limit
        event_hooks={"response": [bound, refusals.note]},
    )
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=most) as streams,
    ):
        yield streams


@asynccontextmanager
async def _piped(server: ChildProcess, refusals: Refusals) -> AsyncIterator[Any]:
    """Carry messages between a process's pipes and the streams that the library takes."""
    received, to_library = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    from_library, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_receive(server, received, refusals)),
        asyncio.create_task(_send(server, to_send)),
    ]
    try:
        yield to_library, from_library
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (received, to_library, from_library, to_send):
            stream.close()


async def _receive(server: ChildProcess, received: Any, refusals: Refusals) -> None:
    """Pass on each line. The stream ends if the server is gone or a line is too long."""
    answered = False
    with suppress(anyio.BrokenResourceError, LineTooLong):
        async with received:
            while (line := await server.receive()) is not None:
                answered = True
                await received.send(_message(line))
            if not answered:
                refusals.last = await _stillborn(server)


async def _stillborn(server: ChildProcess) -> InfrastructureError:
    end = await server.describe_end()
    said = await server.last_words() or "(nothing)"
    return InfrastructureError(
        NEVER_ANSWERED,
        f"the server can't be used: its command ended before it answered ({end}). Run the command "
        f"by itself. The end of what it wrote to stderr:\n{said}",
    )


def _message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _send(server: ChildProcess, to_send: Any) -> None:
    with suppress(OSError):
        async for message in to_send:
            server.send(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
            await server.stdin.drain()


def _is_message(content: bytes) -> bool:
    """Whether a server explains a failure with an error of the protocol."""
    try:
        return isinstance(jsonrpc_message_adapter.validate_json(content), JSONRPCError)
    except ValueError:
        return False


class _Bounded(httpx2.AsyncByteStream):
    """Breaks off an answer that is too long."""

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
