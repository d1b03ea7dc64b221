"""How `run` starts child processes: forked from a preloader, or each on its own.

A service's process spends seconds on imports. A preloader (`preload.py`) has imported what the
recipe's services need and forks each process from itself, so that the first starts share the
imports and a restart skips them. It holds no state and nobody depends on it: where there is none
(not on Linux), or its successor is still importing, a process is started plainly and imports for
itself. A process that was forked outlives its preloader.
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

NEVER_BORN = 256
"""In place of an exit code: the preloader died before it forked the process."""
ENDED_UNSEEN = 257
"""In place of an exit code: the process ended after its preloader, and nobody was told how."""
STARTS = 3
"""So often a run starts a preloader, the first time included."""
BIRTH_S = 120.0
"""A preloader that has not forked a process by then hangs, and is killed."""
MESSAGE_LIMIT = 65_536
"""Bytes of the longest message between `run` and its preloader."""
PRELOADER = "preloader"
"""Its name, as of a log."""


async def spawn(command: Sequence[str], parent: int, log: int) -> asyncio.subprocess.Process:
    """Starts a process plainly, in a session of its own, told the number of its pipe `parent`."""
    return await asyncio.create_subprocess_exec(
        *with_parent(command, parent),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(parent,),
        start_new_session=True,
    )


def with_parent(command: Sequence[str], parent: int) -> list[str]:
    """A command line whose every `{parent_fd}` is the number of the process's pipe."""
    return [part.replace("{parent_fd}", str(parent)) for part in command]


class ForkedProcess:
    """A process that a preloader forked, or will fork. It is used like asyncio's `Process`."""

    def __init__(self, status: socket.socket, on_hang: Callable[[], None]) -> None:
        """The preloader reports on the process through `status`, which ends if the preloader dies.

        `on_hang` is called if the process is not forked in time. It must end the preloader.
        """
        self.pid: int | None = None
        """None before its birth."""
        self._handle: int | None = None
        """A pidfd: it means this very process, even after its pid went to another."""
        self._life = asyncio.create_task(self._live(status, on_hang))

    @property
    def returncode(self) -> int | None:
        """As `wait`, or None while it runs."""
        return self._life.result() if self._life.done() else None

    async def wait(self) -> int:
        """Its exit code, negative for a signal; or NEVER_BORN, or ENDED_UNSEEN."""
        return await asyncio.shield(self._life)

    def send_signal(self, number: int, /) -> None:
        """Sends it a signal; before its birth there is nobody to send it to."""
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, number)

    async def _live(self, status: socket.socket, on_hang: Callable[[], None]) -> int:
        with status:
            hang = asyncio.get_running_loop().call_later(BIRTH_S, on_hang)
            await _readable(status)
            hang.cancel()
            message, handles, _, _ = socket.recv_fds(status, MESSAGE_LIMIT, 1)
            if not message:
                return NEVER_BORN
            self.pid, self._handle = int(message), handles[0]
            try:
                await _readable(status)
                if message := status.recv(MESSAGE_LIMIT):
                    return int(message)
                await _readable(self._handle)
                return ENDED_UNSEEN
            finally:
                os.close(self._handle)
                self._handle = None


Process = asyncio.subprocess.Process | ForkedProcess


async def _readable(descriptor: socket.socket | int) -> None:
    """Waits until there is data to read, or the end. A pidfd ends when its process does."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)


class Preloader:
    """The preloader of a run: started again where it dies, `STARTS` times in all."""

    def __init__(
        self,
        recipe: Path,
        commands: Sequence[Sequence[str]],
        on_change: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`recipe` says what to import, `commands` what will be forked."""
        # A forked process's command line takes the place of the preloader's: it must fit there.
        room = "." * max(len("\0".join(command)) for command in commands)
        self._arguments = (str(recipe), room)
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._askable = False
        """The first preloader is asked while it imports, and all services wait for it. A later one
        is asked once it has imported, because until then a service starts sooner by itself."""
        self._keeper: asyncio.Task[None] | None = None

    async def open(self, folder: Callable[[], Path]) -> None:
        """Starts it; `folder` says where its log goes. It imports for seconds, and answers then.

        Does nothing but on Linux, where a fork is safe and a process has a handle.
        """
        if sys.platform != "linux":
            return
        await self._start(folder())
        self._askable = True
        self._keeper = asyncio.create_task(self._keep(folder), name=PRELOADER)

    def fork(self, command: Sequence[str], parent: int, log: int) -> ForkedProcess | None:
        """Asks for a process of a `headrace` command; None where there is nobody to be asked.

        `parent` is the pipe whose number `{parent_fd}` in the command becomes. Does not wait.
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
        """Ends the preloader, not what it forked."""
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
                self._on_change(f"the {PRELOADER} died: started again")
                await self._start(folder())
        self._on_change(f"the {PRELOADER} died {STARTS} times: services import for themselves now")

    async def _start(self, folder: Path) -> None:
        from services.run import preload  # which imports this module

        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        folder.mkdir(parents=True, exist_ok=True)
        with theirs, (folder / f"{PRELOADER}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", preload.__name__, str(theirs.fileno())),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
