"""A command as a child process, with pipes at its stdin and stdout."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from headrace.services.base.concurrency import finish
from headrace.services.base.redactor import REDACTOR
from headrace.services.processes import guard
from headrace.services.processes.signals import send_signal

END_S = 5.0
"""Seconds that the guard has to kill everything. It usually takes milliseconds."""
NEVER_ANSWERED = "server_ended"
"""The code of the error of a recipe's command that ended before it answered."""
CHUNK_BYTES = 1 << 16
KEPT_BYTES = 2000
"""The end of a child's stderr that an error may show."""


class LineTooLong(Exception):
    """The child wrote a line that exceeds the limit. The rest of its output can't be read."""


class GuardedProcess(Protocol):
    """A guard with the pipes of its command. It is used like asyncio's `Process`."""

    stdin: asyncio.StreamWriter | None
    stdout: asyncio.StreamReader | None
    stderr: asyncio.StreamReader | None

    @property
    def pid(self) -> int:
        """The guard's pid."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, or None while it runs."""

    async def wait(self) -> int:
        """Returns its exit code."""


class ChildProcess:
    """A command under its guard. The one who starts it must close it.

    `aclose` kills the command and all that it started, or only its process group if this is not
    Linux. The same happens if this process dies, or if the command ends by itself.
    """

    def __init__(self, process: GuardedProcess, lifeline: int) -> None:
        """`lifeline` is the writing end of the pipe whose end has the guard kill everything."""
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin = process.stdin
        self.stdout = process.stdout
        self.stderr = process.stderr
        self.pid = process.pid
        """The guard's pid."""
        self._process = process
        self._lifeline = lifeline
        self._copying: asyncio.Task[None] | None = None
        """Copies its stderr to ours."""
        self._stderr_end = bytearray()
        """The last bytes that were copied."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        folder: str | None = None,
        own_folder: bool = False,
        stderr: int | None = None,
        limit: int = CHUNK_BYTES,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Starts a command in a session of its own. Lines of its stdout have at most `limit` bytes.

        `environment` replaces this process's environment. Without `stderr`, what the command writes
        to its stderr goes to that of this process, without the secrets that this process knows. A
        command that can't be run ends with exit code 127. The command also gets the descriptors of
        `pass_fds`. Raises OSError if `folder` does not exist. With `own_folder` the folder is
        removed when the command has ended; its path must be absolute, and it may hold files only.
        """
        copied = None
        if stderr is None:
            copied, stderr = os.pipe()
        try:
            removed = folder if folder and own_folder else ""
            child = await cls._start(
                [removed, *command], environment, folder, stderr, limit, pass_fds
            )
        except BaseException:
            if copied is not None:
                os.close(copied)
            raise
        finally:
            if copied is not None:
                os.close(stderr)
        if copied is not None:
            child._copying = asyncio.create_task(
                _copy_lines(copied, child._stderr_end), name="a child's stderr"
            )
        return child

    @classmethod
    async def _start(
        cls,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None,
        folder: str | None,
        stderr: int,
        limit: int,
        pass_fds: Sequence[int],
    ) -> ChildProcess:
        ours, lifeline = os.pipe()
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(ours), *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                limit=limit,
                env=environment,
                cwd=folder,
                pass_fds=(ours, *pass_fds),
                start_new_session=True,
            ),
            name="the start of a child",
        )
        try:
            return cls(await asyncio.shield(starting), lifeline)
        except asyncio.CancelledError:
            await finish(cls._give_up(starting, lifeline), "a child's end")
            raise
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(ours)

    @classmethod
    async def _give_up(
        cls, starting: asyncio.Task[asyncio.subprocess.Process], lifeline: int
    ) -> None:
        """Ends a child that starts. To cancel the start would kill the guard, and nothing else."""
        try:
            process = await starting
        except OSError:
            os.close(lifeline)
        else:
            await cls(process, lifeline).aclose()

    def send(self, line: bytes) -> None:
        """Writes a line to the child's stdin. Does not wait, so callers bound how much they send.

        If the child has ended, the line is dropped, and `receive` returns None.
        """
        if not self.stdin.is_closing():
            self.stdin.write(line + b"\n")

    async def receive(self) -> bytes | None:
        """Returns the next line of its stdout, or None at the end. Raises LineTooLong."""
        try:
            line = await self.stdout.readline()
        except ValueError as error:
            raise LineTooLong(str(error)) from error
        return line if line.endswith(b"\n") else None

    async def wait(self) -> int:
        """Returns its exit code, or 128 plus the signal's number if a signal ended it.

        It returns only after all output was read, so something must read that meanwhile.
        """
        return await self._process.wait()

    async def describe_end(self) -> str:
        """Says how it ended, after `receive` has returned None: `exit code 7`, `SIGKILL`."""
        if not await self.ends_within(END_S):
            return "it closed its stdout"
        code = await self.wait()
        with suppress(ValueError):
            return signal.Signals(code - 128).name
        return f"exit code {code}"

    async def last_words(self) -> str:
        """Returns the end of what it has written to our stderr, once it has ended."""
        if self._copying is not None:
            await asyncio.wait({self._copying}, timeout=END_S)
        return REDACTOR.text(self._stderr_end.decode(errors="replace")).strip()

    async def ends_within(self, seconds: float) -> bool:
        """Returns whether it ends in time. Reads and drops what it writes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for stream in (self.stdout, self.stderr):
                    while stream is not None and await stream.read(CHUNK_BYTES):
                        pass
                await self.wait()
        return self._process.returncode is not None

    async def aclose(self) -> None:
        """Kills it, and returns when it has ended. Nothing else may read its output meanwhile."""
        os.close(self._lifeline)
        self.stdin.close()
        if not await self.ends_within(END_S):
            send_signal(self._process, signal.SIGKILL)
            await self.ends_within(END_S)
        if self._copying is not None:
            await asyncio.wait({self._copying}, timeout=END_S)
            self._copying.cancel()


async def _copy_lines(descriptor: int, kept: bytearray) -> None:
    """Copies whole lines from a pipe to stderr, until its end. Removes secrets from them.

    A line that is longer than CHUNK_BYTES is copied in parts. `kept` gets the last KEPT_BYTES.
    """
    lines = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(descriptor, "rb", buffering=0)
    )
    rest = b""
    try:
        while chunk := await lines.read(CHUNK_BYTES):
            kept += chunk
            del kept[:-KEPT_BYTES]
            whole, end, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > CHUNK_BYTES:
                whole, rest = whole + end + rest, b""
            _print(whole + end)
        _print(rest)
    finally:
        transport.close()


def _print(data: bytes) -> None:
    if data:
        sys.stderr.write(REDACTOR.text(data.decode(errors="replace")))
        sys.stderr.flush()
