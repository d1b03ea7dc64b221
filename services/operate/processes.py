"""Starts child processes of commands: forked from a preloader, or each one directly.

A service's process spends seconds on imports. A preloader (`run/preload.py`) has imported what the
recipe's services need and forks each process from itself, so that the first processes share the
imports and a restarted one skips them. The preloader holds no state. If there is none, because this
is not Linux or because the next one is still importing, a process is started directly and imports
for itself. A forked process outlives its preloader.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.services.base.concurrency import readable
from headrace.services.base.files import private, private_folder
from headrace.services.processes.signals import send_signal

NEVER_BORN = 256
"""Instead of an exit code: the preloader died before it forked the process."""
ENDED_UNSEEN = 257
"""Instead of an exit code: the process ended after its preloader, which would have reported it."""
STARTS = 3
"""How often a run starts a preloader, including the first time."""
BIRTH_S = 120.0
"""Seconds after which a preloader that has not forked a requested process is killed."""
MESSAGE_LIMIT = 65_536
"""Bytes of the longest message between `run` and its preloader."""
PRELOADER = "preloader"
"""The name of its log and its task."""


def headrace_command(*arguments: str) -> tuple[str, ...]:
    """Returns the command line of a `headrace` command in this interpreter."""
    return (sys.executable, "-m", "headrace", *arguments)


async def spawn(command: Sequence[str], parent: int, log: int) -> asyncio.subprocess.Process:
    """Starts a process directly, in its own session, and gives it the descriptor `parent`."""
    return await asyncio.create_subprocess_exec(
        *with_parent(command, parent),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(parent,),
        start_new_session=True,
    )


def with_parent(command: Sequence[str], parent: int) -> list[str]:
    """Returns a command line with every `{parent_fd}` replaced with the number of the pipe."""
    return [part.replace("{parent_fd}", str(parent)) for part in command]


class ForkedProcess:
    """A process that a preloader forked, or will fork. It is used like asyncio's `Process`."""

    def __init__(self, status: socket.socket, on_hang: Callable[[], None]) -> None:
        """The preloader reports on the process through `status`, which ends if the preloader dies.

        `on_hang` is called if the process is not forked in time. It must end the preloader.
        """
        self.pid: int | None = None
        """None before the process is forked."""
        self._handle: int | None = None
        """A pidfd. It means this process, even if its pid is used again."""
        self._life = asyncio.create_task(self._live(status, on_hang))

    @property
    def returncode(self) -> int | None:
        """What `wait` returns, or None while the process runs."""
        return self._life.result() if self._life.done() else None

    async def wait(self) -> int:
        """Returns its exit code (negative for a signal), NEVER_BORN or ENDED_UNSEEN."""
        return await asyncio.shield(self._life)

    def send_signal(self, number: int, /) -> None:
        """Sends a signal. Does nothing if the process is not forked yet."""
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, number)

    async def _live(self, status: socket.socket, on_hang: Callable[[], None]) -> int:
        with status:
            hang = asyncio.get_running_loop().call_later(BIRTH_S, on_hang)
            await readable(status)
            hang.cancel()
            message, handles, _, _ = socket.recv_fds(status, MESSAGE_LIMIT, 1)
            if not message:
                return NEVER_BORN
            self.pid, self._handle = int(message), handles[0]
            try:
                await readable(status)
                if message := status.recv(MESSAGE_LIMIT):
                    return int(message)
                await readable(self._handle)
                return ENDED_UNSEEN
            finally:
                os.close(self._handle)
                self._handle = None


Process = asyncio.subprocess.Process | ForkedProcess


def signal_process(process: Process, number: int) -> None:
    """Sends a signal to a process that `spawn` or a preloader started, if it runs."""
    if not isinstance(process, ForkedProcess):
        send_signal(process, number)
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


class Preloader:
    """The preloader of a run. If it dies it is started again, `STARTS` times in all."""

    def __init__(
        self,
        recipe: Path,
        commands: Sequence[Sequence[str]],
        on_change: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`recipe` says what to import, `commands` what will be forked."""
        # The command line of a forked process overwrites the preloader's, so it must fit.
        room = "." * max(len("\0".join(command)) for command in commands)
        command = (sys.executable, "-m", "headrace", "preload", "{parent_fd}")
        self._command = (*command, str(recipe), room)
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._askable = False
        """The first preloader is asked while it imports, and all services wait for it. A later one
        is asked once it has imported, because until then a service starts sooner by itself."""
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, folder: Callable[[], Path]) -> None:
        """Starts the preloader. `folder` returns the folder of its log. The imports take seconds.

        Does nothing except on Linux: only there a fork is safe and a process has a pidfd.
        """
        if sys.platform != "linux":
            return
        await self._start(folder())
        self._askable = True
        self._keeper = asyncio.create_task(self._keep(folder), name=PRELOADER)

    def fork(self, command: Sequence[str], parent: int, log: int) -> ForkedProcess | None:
        """Requests a process of a `headrace` command. Returns None if no preloader can be asked.

        `parent` is the pipe whose number replaces `{parent_fd}` in the command. Does not wait.
        """
        if not self._askable:
            return None
        assert self._channel is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                descriptors = [parent, log, theirs.fileno()]
                socket.send_fds(self._channel, [json.dumps(command).encode()], descriptors)
            except OSError:  # it is dead
                ours.close()
                return None
        ours.setblocking(False)
        return ForkedProcess(ours, self._kill)

    async def close(self) -> None:
        """Ends the preloader, but not the processes that it forked."""
        self._askable = False
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            self._kill()
            await self._process.wait()
        if self._channel is not None:
            self._channel.close()

    async def _keep(self, folder: Callable[[], Path]) -> None:
        for start in range(1, STARTS + 1):
            assert self._process is not None
            assert self._channel is not None
            with contextlib.suppress(ConnectionResetError):  # it died with a request unread
                await asyncio.get_running_loop().sock_recv(self._channel, MESSAGE_LIMIT)
            self._askable = True
            await self._process.wait()
            self._askable = False
            self._channel.close()
            if start < STARTS:
                self._on_change(f"the {PRELOADER} died and was started again")
                await self._start(folder())
        self._on_change(f"the {PRELOADER} died {STARTS} times: services now import for themselves")

    async def _start(self, folder: Path) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        private_folder(folder)
        with theirs, open(folder / f"{PRELOADER}.log", "ab", opener=private) as log:
            self._process = await spawn(self._command, theirs.fileno(), log.fileno())

    def _kill(self) -> None:
        if self._process is not None:
            send_signal(self._process, signal.SIGKILL)
