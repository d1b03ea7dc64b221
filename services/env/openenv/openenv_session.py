"""A session with an OpenEnv server: a WebSocket, and one question at a time.

The server keeps an environment for each connection, and gives it up with the connection. So a
connection that is lost is an episode that is lost.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.env.http_environment import PAUSES_S, import_aiohttp, refusal
from headrace.services.env.openenv.openenv_messages import Full, Refused, Step, read_step

HEARTBEAT_S = 40.0
"""Between pings. A server that answers none for half of it is gone, as for OpenEnv's own client."""
CLOSE_S = 1.0
"""Seconds that a server has to end a session: then its place is free for the next one."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Between two times that a full server is asked for a session; doubled from the first on."""


class OpenEnvSession:
    """At most one connection at a time. Whatever goes wrong ends it."""

    def __init__(
        self, url: str, headers: Mapping[str, str], timeout_s: float, most_bytes: int
    ) -> None:
        """A call has `timeout_s`, and its answer at most `most_bytes`.

        As long again a full server is asked for a session.
        """
        self._aiohttp = import_aiohttp("openenv")
        self._url = url
        self._headers = headers
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._http: Any = None
        self._socket: Any = None
        self._heard: asyncio.Task[Any] | None = None
        """The next message. It is always being waited for: so pings are answered while the policy
        thinks, and what comes unasked is seen."""

    @property
    def open(self) -> bool:
        """Whether there is a session, as far as is known here."""
        return self._heard is not None and not self._heard.done()

    async def begin(self, kind: str, data: Mapping[str, Any]) -> Step:
        """Connects, and sends the first message. A full server is asked until it has a place."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout_s
        pause_s = FIRST_PAUSE_S
        while True:
            await self.close()
            await self._connect()
            try:
                return await self.ask(kind, data)
            except Full:
                if loop.time() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Step:
        """The answer to a message. Refused where the server takes no such action."""
        if self._heard is None:
            raise InfrastructureError("sandbox_lost", f"{self._url}: there is no session")
        unasked = self._heard.done()
        try:
            frame = await self._exchange({"type": kind, "data": data}, self._heard)
            step = read_step(self._text(frame), self._url)
            if unasked:
                raise EnvironmentFailed("bad_answer", f"{self._url} says what nobody asked for")
            return step
        except Refused:
            raise
        except BaseException:  # what it would say next may answer this
            await self._drop()
            raise

    async def close(self) -> None:
        """Has the server end the session, and ends the connection; bounded."""
        socket, heard = self._socket, self._heard
        if socket is not None and heard is not None and not heard.done():
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await socket.send_str('{"type": "close"}')
                    await asyncio.wait({heard})
        await self._drop()

    async def _drop(self) -> None:
        """Ends the connection; waits for nothing that a server does."""
        socket, self._socket = self._socket, None
        heard, self._heard = self._heard, None
        http, self._http = self._http, None
        if heard is not None:
            heard.cancel()
            await asyncio.wait({heard})
        if socket is not None:
            await socket.close()
        if http is not None:
            await http.close()

    async def _connect(self) -> None:
        aiohttp = self._aiohttp
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._try_to_connect()
        except TimeoutError as error:
            said = f"{self._url} did not answer in {self._timeout_s:g} s"
            raise InfrastructureError("server_silent", said) from error
        finally:
            if self._socket is None:
                await self._drop()
        self._heard = self._listen()

    async def _try_to_connect(self) -> Any:
        aiohttp = self._aiohttp
        for pause_s in (*PAUSES_S, None):
            try:
                return await self._http.ws_connect(
                    self._url,
                    heartbeat=HEARTBEAT_S,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                    max_msg_size=self._most_bytes,
                )
            except aiohttp.InvalidURL as error:
                raise UsageError(f"url {self._url!r} is no address") from error
            except aiohttp.WSServerHandshakeError as error:
                raise refusal(error.status, error.message.encode(), self._url) from error
            except (aiohttp.ClientError, OSError) as error:
                if pause_s is None:
                    said = f"{self._url}: {type(error).__name__}: {error}"
                    raise InfrastructureError("server_unreachable", said) from error
            await asyncio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _exchange(self, message: Mapping[str, Any], heard: asyncio.Task[Any]) -> Any:
        """Sends a message, and takes what the server says next: perhaps why it hangs up."""
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(ConnectionError):  # it is heard next that it's lost
                    await self._socket.send_str(json.dumps(message))
                await asyncio.wait({heard})
        except TimeoutError as error:
            said = f"{self._url} did not answer in {self._timeout_s:g} s"
            raise InfrastructureError("server_silent", said) from error
        self._heard = self._listen()
        return heard.result()

    def _listen(self) -> asyncio.Task[Any]:
        return asyncio.create_task(self._socket.receive(), name="OpenEnv session")

    def _text(self, frame: Any) -> str:
        """The text of a frame; else the error that the frame is."""
        aiohttp = self._aiohttp
        if frame.type is aiohttp.WSMsgType.TEXT:
            return str(frame.data)
        if frame.type is aiohttp.WSMsgType.BINARY:
            raise EnvironmentFailed("bad_answer", f"{self._url} answers with what is no text")
        if isinstance(frame.data, aiohttp.WebSocketError):
            if frame.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                said = f"{self._url} answers with more than {self._most_bytes // 1024} KiB"
                raise EnvironmentFailed("answer_too_large", said)
            raise EnvironmentFailed("bad_answer", f"{self._url} speaks no WebSocket: {frame.data}")
        said = " ".join(str(part) for part in (frame.data, frame.extra) if part)
        raise InfrastructureError("sandbox_lost", f"{self._url} hung up: {said or 'no reason'}")
