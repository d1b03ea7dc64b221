"""Starts child processes of `run`: forked from a preloader, or each one directly.

A service's process spends seconds on imports. A preloader (`preload.py`) has imported what the
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
from typing import Protocol

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


class Process(Protocol):
    """A child process; `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int | None:
        """None before the process has started."""

    @property
    def returncode(self) -> int | None:
        """What `wait` returns, or None while the process runs."""

    async def wait(self) -> int:
        """Returns its exit code (negative for a signal), NEVER_BORN or ENDED_UNSEEN."""

    def send_signal(self, signal: int, /) -> None:
        """Sends a signal. Raises ProcessLookupError if the process has already ended."""


async def spawn(command: Sequence[str], parent: int, log: int) -> Process:
    """Starts a process directly, in its own session, and gives it the pipe `parent`."""
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
    """A process that a preloader forked, or is about to."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self._handle: int | None = None
        """A pidfd: it means this very process, even after its pid went to another."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._end.result() if self._end.done() else None

    async def wait(self) -> int:
        """Waits until the process has ended, and returns its exit code."""
        return await asyncio.shield(self._end)

    def send_signal(self, number: int, /) -> None:
        """Sends it a signal; before its birth there is nobody to send it to."""
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, number)

    def on_born(self, pid: int, handle: int) -> None:
        """It runs. `handle` is a pidfd, now this object's to close."""
        self.pid, self._handle = pid, handle

    def on_ended(self, code: int) -> None:
        """It runs no more."""
        if self._handle is not None:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None
        if not self._end.done():
            self._end.set_result(code)

    def on_orphaned(self) -> None:
        """Its preloader is gone: nobody will tell of its end any more."""
        if self._handle is None:
            self.on_ended(NEVER_BORN)
        else:
            self._loop.add_reader(self._handle, self.on_ended, ENDED_UNSEEN)


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
        """None while no preloader is there to be asked."""
        self._askable = False
        """At first before it has imported, for all wait then; after a death only once it has."""
        self._unborn: dict[int, ForkedProcess] = {}
        self._living: dict[int, ForkedProcess] = {}
        """By pid."""
        self._asked = 0
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The preloader's, where there is one to be asked."""
        return None if self._channel is None or self._process is None else self._process.pid

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
        if self._channel is None or not self._askable:
            return None
        self._asked += 1
        message = json.dumps({"number": self._asked, "command": list(command)}).encode()
        try:
            socket.send_fds(self._channel, [message], [parent, log])
        except OSError:
            return None  # it is dead, which its end of the channel is about to tell
        process = self._unborn[self._asked] = ForkedProcess()
        asyncio.get_running_loop().call_later(BIRTH_S, self._kill_if_unborn, self._asked)
        return process

    async def close(self) -> None:
        """Ends the preloader, not what it forked."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._process is not None:
            await self._bury()
            await self._lost.wait()

    async def _bury(self) -> None:
        """Ends it where that is yet to do, and waits until it has ended."""
        assert self._process is not None
        self._kill()
        await self._process.wait()

    async def _keep(self, folder: Callable[[], Path]) -> None:
        for _ in range(STARTS - 1):
            await self._lost.wait()
            await self._bury()
            self._on_change(f"the {PRELOADER} died: started again")
            await self._start(folder())
        await self._lost.wait()
        self._on_change(f"the {PRELOADER} died {STARTS} times: services import for themselves now")

    async def _start(self, folder: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder.mkdir(parents=True, exist_ok=True)
        with theirs, (folder / f"{PRELOADER}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace", "preload", str(theirs.fileno())),
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._lost.clear()
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours, self._read, ours)

    def _read(self, channel: socket.socket) -> None:
        """Takes all that the preloader has said."""
        while True:
            try:
                message, handles, _, _ = socket.recv_fds(channel, MESSAGE_LIMIT, 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it died with a request unread; what it had said still comes
            if not message:
                self._on_lost(channel)
                return
            told = json.loads(message)
            if "ready" in told:
                self._askable = True
            elif handles:
                process = self._unborn.pop(told["number"])
                self._living[told["pid"]] = process
                process.on_born(told["pid"], handles[0])
            else:
                self._living.pop(told["pid"]).on_ended(told["code"])

    def _on_lost(self, channel: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(channel)
        channel.close()
        self._channel = None
        self._askable = False
        orphans = [*self._unborn.values(), *self._living.values()]
        self._unborn.clear()
        self._living.clear()
        for process in orphans:
            process.on_orphaned()
        self._lost.set()

    def _kill_if_unborn(self, number: int) -> None:
        if number in self._unborn:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
