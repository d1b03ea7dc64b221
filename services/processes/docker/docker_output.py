"""What a command in a container writes, as the Docker engine sends it.

asyncio reads it from the socket that the SDK returns, so no thread waits for it.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import IO, Any

from headrace.errors import InfrastructureError
from headrace.services.base.concurrency import readable

SEND_S = 60
"""Seconds that the engine has to take the next bytes of a command's input."""
HEADER_BYTES = 8
"""The header of one frame of a command's output: stream, three zeros, big-endian length."""
CHUNK_BYTES = 64 * 1024


class Output:
    """What a command without a terminal writes, both streams as they come.

    https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach
    """

    def __init__(self, host: str, confirm: Callable[[], Awaitable[None]] | None = None) -> None:
        """`confirm` raises InfrastructureError if the output may have ended before its command."""
        self.stream = 0
        """Where the bytes that were read last were written: 1 for stdout, 2 for stderr."""
        self._host = host
        self._confirm = confirm
        self._received = bytearray()
        self._left = 0
        """Bytes of the current frame that are not read yet."""
        self._lock = threading.Lock()
        self._response: Any = None
        self._socket: Any = None
        self._closed = False

    def open(self, stream: Any, given: IO[bytes] | None = None) -> None:
        """Takes what the SDK's `exec_start` returned, and sends `given`. Called in a thread."""
        with self._lock:
            self._response = stream._response
            self._socket = getattr(stream, "_sock", stream)  # with TLS, the socket is `stream`
        if given is not None:
            self._send(given)
        with self._lock:
            if self._closed:  # the caller gave up meanwhile
                self._response.raw.close()
                return
            self._socket.setblocking(False)
            # The headers were read through a buffer, which may contain the stream's first bytes.
            with suppress(ssl.SSLWantReadError):
                self._received += self._response.raw._fp.fp.peek()

    def _send(self, given: IO[bytes]) -> None:
        self._socket.settimeout(SEND_S)
        given.seek(0)
        with suppress(BrokenPipeError, ConnectionResetError):  # the command ended without reading
            while chunk := given.read(CHUNK_BYTES):
                self._socket.sendall(chunk)

    def close(self) -> None:
        """Closes the connection. The command goes on."""
        with self._lock:
            self._closed = True
            if self._response is not None:
                self._response.raw.close()

    async def read(self) -> bytes:
        """Returns the next bytes, or none at the end. A cancelled call loses no bytes."""
        while not self._left:
            while len(self._received) < HEADER_BYTES:
                if not await self._receive():
                    return b""
            self.stream = self._received[0]
            self._left = int.from_bytes(self._received[4:HEADER_BYTES], "big")
            del self._received[:HEADER_BYTES]
        if not self._received and not await self._receive():
            return b""
        chunk = bytes(self._received[: self._left])
        del self._received[: self._left]
        self._left -= len(chunk)
        return chunk

    async def drain(self) -> None:
        """Reads to the end of the command."""
        while await self.read():
            pass

    async def _receive(self) -> int:
        """Waits for bytes and takes what is there. Returns their number, which is 0 at the end."""
        await asyncio.sleep(0)  # a command that writes without end must not block other tasks
        while True:
            try:
                received = self._socket.recv(CHUNK_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                await readable(self._socket.fileno())
            except OSError as error:
                message = f"{self._host}: a command's output: {type(error).__name__}: {error}"
                raise InfrastructureError("engine_unreachable", message) from error
            else:
                if not received and self._confirm is not None:
                    await self._confirm()
                self._received += received
                return len(received)
