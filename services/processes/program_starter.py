"""Starts a program again and again, in milliseconds if it is a Python program.

The first start of a Python program starts its fork server (`fork_server.py`), which has imported
the packages that the program imports. Each later start is a fork of it. Any other program, and one
that can't be forked safely, is started as a new process each time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.services.base.redactor import REDACTOR
from headrace.services.processes import fork_server
from headrace.services.processes.allowed_environment import ALLOWED, ALLOWED_PREFIX
from headrace.services.processes.child_process import END_S, ChildProcess
from headrace.services.processes.forked_process import NotForked, fork_process

logger = logging.getLogger(__name__)

READY_S = 120.0
"""Seconds that the imports may take, with all repetitions. After that, each attempt is a new
process."""
DEATHS = 3
"""After so many deaths of its fork server, a program is started as a new process each time."""
SKIPPED = 16
"""Largest number of packages that are left out because a fork would not be safe."""
FORKS = 8
"""Largest number of forks at one time."""
INTERPRETER = re.compile(r"python[0-9.]*")
FLAGS = re.compile(r"-[bBdEIOPqsSuv]+|-[WX].+")
NATIVE = (ALLOWED_PREFIX, "PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_")
"""Prefixes of variables that an interpreter or a native library reads when it is loaded."""


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """What a command that starts a Python program consists of."""

    target: int
    """The position of the program's path, or of the module's name."""
    is_module: bool


def read_command(command: Sequence[str]) -> PythonCommand | None:
    """Returns the parts of a command like `python FLAGS a.py …` or `python FLAGS -m a …`.

    Returns None for any other command.
    """
    if not INTERPRETER.fullmatch(os.path.basename(command[0])):
        return None
    at = 1
    while at < len(command) and (command[at] in ("-W", "-X") or FLAGS.fullmatch(command[at])):
        at += 2 if command[at] in ("-W", "-X") else 1
    if command[at : at + 1] == ["-m"] and at + 1 < len(command):
        return PythonCommand(at + 1, is_module=True)
    if at < len(command) and command[at].endswith(".py") and not command[at].startswith("-"):
        return PythonCommand(at, is_module=False)
    return None


def split_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the variables that a fork server gets, and those that only attempts get.

    Fork servers get the usual ones and those that an interpreter reads at its start, unless their
    values have a secret.
    """
    shared = {
        name: value
        for name, value in environment.items()
        if (name in ALLOWED or name.startswith(NATIVE)) and not REDACTOR.finds(value.encode())
    }
    return shared, {name: environment[name] for name in environment.keys() - shared.keys()}


class ProgramStarter:
    """Starts one program many times. The one who calls `open` must close it."""

    def __init__(self, command: Sequence[str], folder: str | None) -> None:
        self.command = list(command)
        self._folder = folder
        self._python: PythonCommand | None = None
        """None if each start is a new process."""
        self._server: asyncio.Task[_ForkServer | None] | None = None
        self._deaths = 0

    def open(self) -> None:
        """From now on uses a fork server if the program is a Python program."""
        if sys.platform == "linux":
            self._python = read_command(self.command)

    async def aclose(self) -> None:
        """Ends the fork server, with all attempts that run."""
        self._python = None
        if self._server is not None:
            self._server.cancel()
            (server,) = await asyncio.gather(self._server, return_exceptions=True)
            if isinstance(server, _ForkServer):
                await server.aclose()
            self._server = None

    async def start(self, environment: Mapping[str, str]) -> ChildProcess:
        """Starts the program with exactly these variables. Raises OSError if `folder` is missing.

        Its stderr is a pipe, as its stdout is.
        """
        shared, withheld = split_environment(environment)
        while (server := await self._running(environment)) and server.shared == shared:
            if self._folder is not None:
                os.scandir(self._folder).close()
            try:
                return await server.fork(withheld)
            except NotForked as error:
                await asyncio.wait({server.ended}, timeout=END_S)
                if not server.ended.done():
                    logger.warning("%s: %s. It is started as a new process", self._name(), error)
                    break
        return await ChildProcess.start(
            self.command, environment, folder=self._folder, stderr=asyncio.subprocess.PIPE
        )

    async def _running(self, environment: Mapping[str, str]) -> _ForkServer | None:
        """Returns the fork server, or None if the program has none. Waits for its imports."""
        if self._server is not None and self._server.done():
            server = self._server.result()
            if server is None or not server.ended.done():
                return server
            self._server = None
            self._count_death(server.ended.result())
            await server.aclose()
        if self._python is None:
            return None
        if self._server is None:
            begun = self._begin(self._python, environment)
            self._server = asyncio.create_task(begun, name="a fork server")
        # If this attempt is cancelled, others still wait.
        return await asyncio.shield(self._server)

    def _count_death(self, end: str) -> None:
        self._deaths += 1
        if self._deaths < DEATHS:
            logger.warning("%s: the fork server ended (%s) and is started again", self._name(), end)
            return
        self._python = None
        logger.warning(
            "%s: the fork server ended (%s) %d times. Each attempt is now a new process",
            self._name(), end, DEATHS,
        )  # fmt: skip

    async def _begin(
        self, python: PythonCommand, environment: Mapping[str, str]
    ) -> _ForkServer | None:
        """Starts a fork server, without the imports that make a fork unsafe."""
        skipped: list[str] = []
        try:
            async with asyncio.timeout(READY_S):
                while True:
                    begun = await _ForkServer.start(
                        self.command, python, environment, self._folder, skipped
                    )
                    if isinstance(begun, _ForkServer):
                        logger.info("%s: attempts are forks of process %d", self._name(), begun.pid)
                        return begun
                    name, why = begun
                    if not name or len(skipped) == SKIPPED:
                        break
                    skipped.append(name)
                    logger.warning(
                        "%s: each attempt imports %s for itself, because a fork would not be safe: "
                        "%s", self._name(), name, why,
                    )  # fmt: skip
        except TimeoutError:
            why = f"its imports took more than {READY_S:g} s"
        except OSError as error:
            why = str(error)
        logger.warning("%s: each attempt is a new process (%s)", self._name(), why)
        return None

    def _name(self) -> str:
        return REDACTOR.text(shlex.join(self.command))


class _ForkServer:
    """A fork server that has imported its packages."""

    def __init__(
        self, process: ChildProcess, channel: socket.socket, shared: Mapping[str, str]
    ) -> None:
        self.pid = process.pid
        self.shared = shared
        """Its variables."""
        self.ended = asyncio.create_task(_end_of(process), name="a fork server's end")
        """Returns how it ended."""
        self._process = process
        self._channel = channel
        self._room = asyncio.Semaphore(FORKS)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        python: PythonCommand,
        environment: Mapping[str, str],
        folder: str | None,
        skipped: Sequence[str],
    ) -> _ForkServer | tuple[str, str]:
        """Returns it, or the name of an import that makes a fork unsafe, and why.

        Raises OSError if it can't be started or ends.
        """
        shared, withheld = split_environment(environment)
        target, flags = python.target, command[1 : python.target - python.is_module]
        setup = {
            "target": target,
            "is_module": python.is_module,
            "skipped": skipped,
            "withheld": sorted(withheld),
        }
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setblocking(False)
        path = str(Path(fork_server.__file__).resolve())
        number = theirs.fileno()
        process: ChildProcess | None = None
        try:
            with theirs:
                process = await ChildProcess.start(
                    (command[0], *flags, path, str(number), *command), shared,
                    folder=folder, pass_fds=(number,),
                )  # fmt: skip
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(channel, json.dumps(setup).encode())
            answer = await loop.sock_recv(channel, fork_server.MESSAGE_BYTES)
            if not answer:
                raise OSError(f"its fork server ended: {await process.describe_end()}")
            if (danger := json.loads(answer)) is None:
                return cls(process, channel, shared)
            name, why = danger
        except BaseException:
            channel.close()
            if process is not None:
                await process.aclose()
            raise
        channel.close()
        await process.aclose()
        return name, why

    async def fork(self, withheld: Mapping[str, str]) -> ChildProcess:
        """Starts an attempt, with further variables. Raises NotForked."""
        async with self._room:
            return await fork_process(self._channel, withheld)

    async def aclose(self) -> None:
        """Kills it, and all attempts."""
        self._channel.close()
        self.ended.cancel()
        await asyncio.wait({self.ended})
        await self._process.aclose()


async def _end_of(process: ChildProcess) -> str:
    await process.wait()
    return await process.describe_end()
