"""What a command in a pod writes, and how it ends.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ (`PodExecOptions`);
each message begins with the number of its channel.
"""

from __future__ import annotations

import json
from typing import IO

import aiohttp

from headrace.errors import InfrastructureError
from headrace.services.processes.docker.docker_errors import NotThere

STDIN, STDOUT, STDERR, STATUS = range(4)
CHUNK_BYTES = 32 * 1024
NEVER_BEGAN = 126
"""Exit code of a command that the node could not start, as shells have it."""


class CommandStream:
    """The output of a command without a terminal, both streams as they come."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse, what: str) -> None:
        """`what` names the command in errors."""
        self.stream = 0
        """Where the bytes that were read last were written: 1 for stdout, 2 for stderr."""
        self._connection = connection
        self._what = what
        self._ended = False
        self._code: int | None = None

    async def send(self, given: IO[bytes]) -> None:
        """Sends bytes to the command's stdin. A command that has ended without reading is fine."""
        given.seek(0)
        try:
            while chunk := given.read(CHUNK_BYTES):
                await self._connection.send_bytes(bytes((STDIN,)) + chunk)
        except (aiohttp.ClientError, OSError):
            pass  # what it says, and its exit code, tell

    async def read(self) -> bytes:
        """Returns the next bytes, or none at the end. A cancelled call loses no bytes."""
        while not self._ended:
            message = await self._connection.receive()
            if message.type is not aiohttp.WSMsgType.BINARY:
                self._ended = True
                if message.type is aiohttp.WSMsgType.ERROR:
                    words = f"{self._what}: {message.data}"
                    raise InfrastructureError("engine_unreachable", words)
                break
            self.stream, data = message.data[0], message.data[1:]
            if self.stream in (STDOUT, STDERR) and data:
                return bytes(data)
            if self.stream == STATUS:
                self._ended = True
                self._code, said = exit_of(data)
                return said
        return b""

    async def drain(self) -> None:
        """Reads to the end of the command."""
        while await self.read():
            pass

    def exit_code(self) -> int | None:
        """Returns the exit code, or None if the command still runs.

        Raises NotThere if the connection ended before the command.
        """
        if self._ended and self._code is None:
            message = f"{self._what}: the connection ended, and the exit code was not sent"
            raise NotThere("sandbox_lost", message)
        return self._code


class KeptStream:
    """The output of a command that has ended."""

    def __init__(self, said: bytes, code: int) -> None:
        self._said = said
        self._code = code

    async def read(self) -> bytes:
        """Returns all bytes, and none the next time."""
        said, self._said = self._said, b""
        return said

    async def drain(self) -> None:
        """Drops what is not read."""
        self._said = b""

    def exit_code(self) -> int | None:
        """Returns the exit code."""
        return self._code


def exit_of(status: bytes) -> tuple[int, bytes]:
    """Returns the exit code that the last message of a command names, and what it says besides.

    If the node could not start the command, the code is NEVER_BEGAN.
    """
    try:
        found = json.loads(status)
        if found.get("status") == "Success":
            return 0, b""
        causes = (found.get("details") or {}).get("causes") or ()
        for cause in causes:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"]), b""
        return NEVER_BEGAN, str(found.get("message", "")).encode()[:CHUNK_BYTES]
    except (ValueError, AttributeError, KeyError, TypeError):
        return NEVER_BEGAN, status[:CHUNK_BYTES]
