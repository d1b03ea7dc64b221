"""Reaches a Docker engine by SSH: one process `ssh` forwards the engine's socket for all calls.

`ssh` reads the user's configuration, keys and agent, as it does for the command `docker`. It does
not ask: a key that needs a passphrase must be in the agent, and the host's key must be known. The
options of this module do not reach another `ssh` that it starts for a jump host.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from headrace.errors import InfrastructureError
from headrace.services.base.redactor import REDACTOR
from headrace.services.processes.child_process import ChildProcess

SCHEME = "ssh://"
MAX_PORT = (1 << 16) - 1
ENGINE_SOCKET = "/var/run/docker.sock"
"""Where an engine listens, unless the address has another path."""
OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=10",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    # A connection that other processes share would go on after this one. A jump host's connection
    # follows the user's configuration alone.
    "ControlMaster=no",
    "ControlPath=none",
    "StreamLocalBindMask=0177",
    # The forwards that the user has configured for this host don't matter here.
    "ExitOnForwardFailure=no",
    "ClearAllForwardings=no",
    # Older than OpenSSH 8.7, ssh does not know the next option. This one replaces the user's list
    # of unknown options that are ignored, so it has all.
    "IgnoreUnknown=*",
    "ForkAfterAuthentication=no",
    "LogLevel=INFO",
)
"""https://man.openbsd.org/ssh_config"""
NEVER_ASK = {"SSH_ASKPASS_REQUIRE": "never"}
"""Keeps also the `ssh` of a jump host from asking in a window. It has no terminal to ask at.
OpenSSH knows this since 8.4."""
START_S = 20.0
"""Seconds that ssh has to connect and to authenticate."""
PAUSE_S = 3.0
"""Seconds after a start, failed or not, in which ssh is not started again. It is up to twice as
much, by chance: a server refuses some if many workers connect at the same time."""
POLL_S = 0.02
WORDS_S = 0.1
"""Seconds that ssh has to say why it closed a connection."""
SOCKET_PATH_BYTES = 100
"""Longest path of a Unix socket, with some room: Linux has 107 bytes for it, macOS 103."""
_ADDRESS = re.compile(
    r"(?i:ssh)://(?:(?P<user>[A-Za-z0-9_.][\w.+-]*)@)?"
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_][\w.-]*))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>/[\w./@+-]*)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host that SSH reaches, and its engine's socket."""

    name: str
    """A host name, an IP address, or a name in the user's configuration of ssh."""
    user: str = ""
    """Empty means that the configuration of ssh says it."""
    port: str = ""
    socket: str = ENGINE_SOCKET

    def command(self, *options: str) -> tuple[str, ...]:
        """Returns the command that connects, without what it does there."""
        user = ("-l", self.user) if self.user else ()
        port = ("-p", self.port) if self.port else ()
        return ("ssh", *options, *user, *port, "--", self.name)


def is_ssh(url: str) -> bool:
    """Returns whether an engine's address is reached by SSH."""
    return url.lower().startswith(SCHEME)


def read_ssh_address(url: str) -> SshHost:
    """Reads an address, as in DOCKER_HOST. Raises ValueError if it is not one of SSH."""
    found = _ADDRESS.fullmatch(url)
    if found is None:
        raise ValueError(
            "the address is not ssh://USER@HOST:PORT/PATH. USER, PORT and PATH (of the engine's "
            "socket) may be left out. It can't have a password: ssh uses the user's keys and "
            "agent. It is not shown here, since it may have one"
        )
    if found["port"] and not 0 < int(found["port"]) <= MAX_PORT:
        raise ValueError(f"{url!r} has the port {found['port']}, which must be 1 to {MAX_PORT}")
    path = (found["path"] or "").rstrip("/")
    name = found["address"] or found["name"]
    return SshHost(name, found["user"] or "", found["port"] or "", path or ENGINE_SOCKET)


class SshForward:
    """The process `ssh` of one host. It starts if it is needed, also if it has ended.

    It ends with this process, however that ends.
    """

    def __init__(self, host: SshHost) -> None:
        self._host = host
        self._path = Path()
        self._child: ChildProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        """Reads what ssh says, until it ends."""
        self._ending: asyncio.Task[None] | None = None
        """Ends ssh. It goes on if its caller is cancelled, and the next one waits for it."""
        self._said: deque[tuple[float, str]] = deque(maxlen=5)
        """The last lines that ssh wrote to its stderr, and when."""
        self._failure, self._next_start = "", 0.0
        """Why the last start failed, and when the next may be."""
        self._starting = asyncio.Lock()
        self._closed = False

    async def require(self) -> str:
        """Returns the path of a socket of this host that leads to the engine.

        If ssh doesn't run, it is started, and the path is a new one. Raises InfrastructureError
        `engine_unreachable` if ssh can't connect, or has just been started and ended again.
        """
        async with self._starting:
            if self._closed:
                raise _closed()
            # The guard removes the socket before it ends itself.
            if self._reading is not None and not self._reading.done() and self._path.exists():
                return str(self._path)
            await self._end()
            if _time() < self._next_start:
                raise InfrastructureError("engine_unreachable", self._failure or self._ended())
            try:
                await self._start()
            except BaseException as error:
                # A cancelled start does not count: other callers may wait for one.
                if isinstance(error, InfrastructureError):
                    self._pause(error.message)
                await self._end()
                raise
            self._pause()
            return str(self._path)

    async def said_since(self, moment: float) -> str:
        """Returns what ssh has written since a moment of the event loop's clock."""
        await asyncio.sleep(WORDS_S)
        return "; ".join(line for when, line in self._said if when >= moment)

    async def aclose(self) -> None:
        """Ends ssh."""
        self._closed = True
        async with self._starting:
            await self._end()

    async def _start(self) -> None:
        folder = _private_folder()
        self._path = folder / "docker.sock"
        options = [part for option in OPTIONS for part in ("-o", option)]
        # The path is relative to `folder`, since ssh would replace some characters in it.
        forward = ("-N", "-T", "-L", f"./{self._path.name}:{self._host.socket}")
        began = _time()
        try:
            self._child = await ChildProcess.start(
                self._host.command(*options, *forward),
                {**os.environ, **NEVER_ASK},
                folder=str(folder),
                own_folder=True,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException:
            rmtree(folder, ignore_errors=True)
            raise
        self._reading = asyncio.create_task(self._read(self._child), name="what ssh says")
        while True:
            if self._closed:
                raise _closed()
            if _connects(self._path):
                return
            if self._reading.done():
                raise self._not_connected(f"ssh ended with {await self._child.describe_end()}")
            if _time() > began + START_S:
                raise self._not_connected(f"ssh has not connected in {START_S:g} s")
            await asyncio.sleep(POLL_S)

    def _pause(self, failure: str = "") -> None:
        self._failure = failure
        self._next_start = _time() + PAUSE_S * random.uniform(1, 2)

    def _words(self) -> str:
        return "; ".join(line for _, line in self._said) or "it said nothing"

    def _ended(self) -> str:
        return (
            f"ssh connected and soon ended ({self._words()}). A call that comes "
            f"{2 * PAUSE_S:g} s after its start connects again"
        )

    def _not_connected(self, what: str) -> InfrastructureError:
        tried = ("-N", "-o", "BatchMode=yes", "-o", "ControlPath=none")
        command = " ".join(self._host.command(*tried))
        return InfrastructureError(
            "engine_unreachable",
            f"{what} ({self._words()}). Try this command as the user of the worker. It must stay "
            f"silent; end it with Ctrl-C: {command}",
        )

    async def _read(self, child: ChildProcess) -> None:
        assert child.stderr is not None
        self._said.clear()
        # Parts, since a line may be longer than what a reader keeps.
        while part := await child.stderr.read(1 << 12):
            for line in part.decode(errors="replace").splitlines():
                if line.strip():
                    self._said.append((_time(), REDACTOR.text(line.strip(), 500)))

    async def _end(self) -> None:
        if self._child is not None and self._reading is not None:
            end = _close(self._child, self._reading, self._path.parent)
            self._ending = asyncio.create_task(end, name="end of ssh")
            self._child = self._reading = None
        if self._ending is not None:
            try:
                await asyncio.shield(self._ending)
            finally:
                if self._ending.done():
                    self._ending = None


async def _close(child: ChildProcess, reading: asyncio.Task[None], folder: Path) -> None:
    try:
        reading.cancel()
        await asyncio.wait({reading})
    finally:
        try:
            await child.aclose()
        finally:
            rmtree(folder, ignore_errors=True)  # It is left if the guard was killed.


def _closed() -> InfrastructureError:
    return InfrastructureError("engine_closed", "the worker is ending")


def _time() -> float:
    return asyncio.get_running_loop().time()


def _private_folder() -> Path:
    """Makes a folder that only this user can open, with a path that is short enough."""
    folder = tempfile.mkdtemp(prefix="headrace-ssh-")
    if len(folder.encode()) > SOCKET_PATH_BYTES - len("/docker.sock"):
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="headrace-ssh-", dir="/tmp")
    return Path(folder)


def _connects(path: Path) -> bool:
    """Returns whether ssh accepts connections, as it does once it has authenticated."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == 0
