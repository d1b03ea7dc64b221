"""The worker's end of a process that a fork server forks: its pipes, its lifeline and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import IO

from headrace.services.processes.child_process import CHUNK_BYTES, ChildProcess

BIRTH_S = 30.0
"""Seconds in which a process must be forked."""
LOST = 128 + signal.SIGKILL
"""Exit code if the guard was killed, so that nobody can say it."""


class NotForked(Exception):
    """The fork server has ended, or can't fork now."""


class ForkedGuard:
    """The guard of a forked process. It is a GuardedProcess."""

    def __init__(
        self,
        pid: int,
        status: socket.socket,
        stdin: asyncio.StreamWriter,
        stdout: asyncio.StreamReader,
        stderr: asyncio.StreamReader,
    ) -> None:
        """The guard sends the exit code through `status`, and then ends."""
        self.pid = pid
        self.stdin: asyncio.StreamWriter | None = stdin
        self.stdout: asyncio.StreamReader | None = stdout
        self.stderr: asyncio.StreamReader | None = stderr
        self._life = asyncio.create_task(_exit_code(status), name="a forked process")

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._life.result() if self._life.done() else None

    async def wait(self) -> int:
        """Returns the exit code."""
        return await asyncio.shield(self._life)


async def fork_process(channel: socket.socket, environment: Mapping[str, str]) -> ChildProcess:
    """Asks a fork server for a process, and waits until it exists. Raises NotForked.

    `environment` has the variables that the fork server lacks.
    """
    with ExitStack() as ours:
        with ExitStack() as theirs:
            status, its_status = socket.socketpair()
            ours.enter_context(status)
            theirs.enter_context(its_status)
            its_stdin, stdin = _pipe(theirs, ours)
            stdout, its_stdout = _pipe(ours, theirs)
            stderr, its_stderr = _pipe(ours, theirs)
            guarded, lifeline = _pipe(theirs, ours)
            passed = (its_stdin, its_stdout, its_stderr, guarded, its_status)
            try:
                socket.send_fds(channel, [b"."], [one.fileno() for one in passed])
            except OSError as error:
                raise NotForked(f"its fork server can't be asked ({error.strerror})") from error
        pid = await _birth(status, environment)
        streams = await _writer(stdin), await _reader(stdout), await _reader(stderr)
        child = ChildProcess(ForkedGuard(pid, status, *streams), os.dup(lifeline.fileno()))
        lifeline.close()
        ours.pop_all()
    return child


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Returns a pipe whose two ends belong to two stacks."""
    read, write = os.pipe()
    return (
        reading.enter_context(os.fdopen(read, "rb", buffering=0)),
        writing.enter_context(os.fdopen(write, "wb", buffering=0)),
    )


async def _birth(status: socket.socket, environment: Mapping[str, str]) -> int:
    """Gives a process its variables, and returns its guard's pid."""
    status.setblocking(False)
    given = json.dumps(dict(environment)).encode() + b"\n"
    try:
        async with asyncio.timeout(BIRTH_S):
            await asyncio.get_running_loop().sock_sendall(status, given)
            pid = await _line(status)
    except (OSError, TimeoutError) as error:
        raise NotForked(f"its fork server did not fork it ({error!r})") from error
    if not pid:
        raise NotForked("its fork server did not fork it")
    return int(pid)


async def _exit_code(status: socket.socket) -> int:
    with status:
        code = b""
        with suppress(OSError):
            code = await _line(status)
    return int(code) if code else LOST


async def _line(status: socket.socket) -> bytes:
    """Reads a short line. It is empty at the end."""
    line = b""
    while (byte := await asyncio.get_running_loop().sock_recv(status, 1)) not in (b"\n", b""):
        line += byte
    return line


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(CHUNK_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader


async def _writer(pipe: IO[bytes]) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), pipe
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)
