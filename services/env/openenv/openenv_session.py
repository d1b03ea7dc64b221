"""A session with an OpenEnv server: a WebSocket that carries one request at a time.

The server keeps one environment per connection and drops it with the connection. So if the
connection is lost, the episode is lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace.errors import EnvironmentFailed, InfrastructureError
from headrace.services.env.http_environment import (
    Room,
    answering_within,
    import_aiohttp,
    refusal,
    retried,
)
from headrace.services.env.openenv.openenv_messages import Refused, Step, read_step

HEARTBEAT_S = 40.0
"""Seconds between pings. As in OpenEnv's own client, a ping that is not answered within half of
that ends the connection."""
CLOSE_S = 1.0
"""Seconds that a server has to end a session, which makes room for the next session."""


class OpenEnvSession:
    """Holds at most one connection. Every error ends it."""

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout_s: float, most_bytes: int
    ) -> None:
        """A call may take `timeout_s` seconds, and its answer may have `most_bytes` bytes.

        A server that is full or not there is asked for a session for another `timeout_s` seconds.
        """
        self._aiohttp = import_aiohttp("openenv")
        self._url = url
        self._headers = headers
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self.room = Room(timeout_s)
        self._http: Any = None
        self._socket: Any = None
        self._next: asyncio.Task[Any] | None = None
        """The next message. The session always waits for one: that answers pings while the policy
        generates, and notices messages that no request asked for."""

    @property
    def open(self) -> bool:
        """Whether there is a session, as far as this side knows."""
        return self._next is not None and not self._next.done()

    async def begin(self, kind: str, data: Mapping[str, Any]) -> Step:
        """Connect and send the first message. A server without room, or none, is asked again."""

        async def asked() -> Step:
            await self.close()
            await self._connect()
            return await self.ask(kind, data)

        return await self.room.until_free(asked)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Step:
        """Send a message and return the answer. Raises Refused if the server refuses the action."""
        if self._next is None:
            raise InfrastructureError("sandbox_lost", f"there is no session with {self._url}")
        unasked = self._next.done()
        try:
            frame = await self._exchange({"type": kind, "data": data}, self._next)
            step = read_step(self._text(frame), self._url)
            if unasked:
                message = f"{self._url} sent a message that no request asked for"
                raise EnvironmentFailed("bad_answer", message)
            return step
        except Refused:
            raise
        except BaseException:  # the next message might answer this request
            await self._drop()
            raise

    async def close(self) -> None:
        """Ask the server to end the session, and end the connection. It takes bounded time."""
        socket, answer = self._socket, self._next
        if socket is not None and answer is not None and not answer.done():
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await socket.send_str('{"type": "close"}')
                    await asyncio.wait({answer})
        await self._drop()

    async def _drop(self) -> None:
        """End the connection without waiting for the server."""
        socket, self._socket = self._socket, None
        answer, self._next = self._next, None
        http, self._http = self._http, None
        if answer is not None:
            answer.cancel()
            await asyncio.wait({answer})
        if socket is not None:
            await socket.close()
        if http is not None:
            await http.close()

    async def _connect(self) -> None:
        self._http = self._aiohttp.ClientSession(headers=self._headers)
        try:
            async with answering_within(self._timeout_s, self._url):
                self._socket = await retried(self._url, self._try_to_connect)
        finally:
            if self._socket is None:
                await self._drop()
        self._next = self._receive()

    async def _try_to_connect(self) -> Any:
        aiohttp = self._aiohttp
        try:
            return await self._http.ws_connect(
                self._url,
                heartbeat=HEARTBEAT_S,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                max_msg_size=self._most_bytes,
            )
        except aiohttp.WSServerHandshakeError as error:
            message = error.message.encode()
            raise refusal(error.status, error.headers, message, self._url) from error

    async def _exchange(self, message: Mapping[str, Any], answer: asyncio.Task[Any]) -> Any:
        """Send a message and return the next frame, which may say why the server hangs up."""
        async with answering_within(self._timeout_s, self._url):
            with suppress(ConnectionError):  # the next frame says that the connection is lost
                await self._socket.send_str(json.dumps(message))
            await asyncio.wait({answer})
        self._next = self._receive()
        return answer.result()

    def _receive(self) -> asyncio.Task[Any]:
        return asyncio.create_task(self._socket.receive(), name="OpenEnv session")

    def _text(self, frame: Any) -> str:
        """Return the text of a frame, or raise the error that the frame stands for."""
        aiohttp = self._aiohttp
        if frame.type is aiohttp.WSMsgType.TEXT:
            return str(frame.data)
        if frame.type is aiohttp.WSMsgType.BINARY:
            raise EnvironmentFailed("bad_answer", f"{self._url} answered with a binary message")
        if isinstance(frame.data, aiohttp.WebSocketError):
            if frame.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                limit = f"more than {self._most_bytes // 1024} KiB; raise answer_kb"
                raise EnvironmentFailed("answer_too_large", f"{self._url} answered with {limit}")
            message = f"{self._url} broke the WebSocket protocol: {frame.data}"
            raise EnvironmentFailed("bad_answer", message)
        reason = " ".join(str(part) for part in (frame.data, frame.extra) if part)
        raise InfrastructureError("sandbox_lost", f"{self._url} hung up: {reason or 'no reason'}")
