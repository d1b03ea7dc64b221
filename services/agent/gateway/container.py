"""Runs the program of one attempt in a container that can reach the gateway and nothing else.

There are two containers: the program's, and that of a relay. The program shares the network and
process namespaces of the relay. The network has only a loopback, on which the relay listens; the
relay has the gateway's Unix socket. The relay is the first process of the namespace, and ends when
its connection to the worker (the lifeline) ends. So whatever happens to the worker, the kernel then
kills the program, and the engine removes both containers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.services.agent.gateway.program_process import TAIL_BYTES, Ended
from headrace.services.base.clock import now
from headrace.services.base.concurrency import finish
from headrace.services.processes.docker.ceilings import read_ceilings
from headrace.services.processes.docker.docker_engine import DockerEngine, Output
from headrace.services.processes.docker.engine_checks import require_engine
from headrace.services.processes.docker.hardened import (
    USER,
    WORK,
    Limits,
    Positive,
    container,
    read_limits,
)
from headrace.services.processes.docker.pinned_images import PinnedImage, PinnedImages

logger = logging.getLogger(__name__)

PORT = 8100
"""The port on the container's own loopback."""
BASE_URL = f"http://127.0.0.1:{PORT}/v1"
MOUNTED = "/run/headrace"
EPISODE = "episode.json"
LIFELINE = "lifeline"
FOLDER = "headrace-agent-"
"""The prefix of the private folders of attempts."""
SHARED = "shared"
"""The folder in it that an attempt shares with its containers."""
RELAY = Path(__file__).with_name("relay.py")
RELAY_LIMITS = Limits(memory_mb=64, pids=16, disk_mb=4)
READY_S = 60.0
"""Seconds until the relay must listen: a busy host is slow to start a container."""
STDERR = 2
"""The number of the error stream."""
KILLED = 137
WHOSE = "option container of agent 'command'"
LABEL, DEADLINE = "headrace.agent", "headrace.deadline"
OVERDUE_S = 60.0
"""Seconds after its deadline when a container is removed that never started; clocks differ."""


class ContainerSettings(Limits):
    """The option `container` of the agent `command`. The ceilings of the worker's host limit it."""

    image: str
    """The image with the program. It needs `sh` and `sleep`."""
    relay_image: str = "python:3.12-slim"
    """An image with `python3`, for the relay."""
    memory_mb: Positive = 512
    pids: Positive = 128
    disk_mb: Positive = 256


class AgentContainers:
    """The containers of one agent of the recipe."""

    def __init__(self, options: Mapping[str, Any], whose: str = WHOSE) -> None:
        """Raises UsageError, which names each wrong option, and options above a ceiling."""
        self.settings = read_limits(ContainerSettings, options, whose)
        self.ceilings = read_ceilings()
        self.ceilings.require(self.settings, whose)
        self.images = PinnedImages(whose, self.ceilings)
        self._whose = whose
        self._engine: DockerEngine | None = None
        self._checking = asyncio.Lock()
        self._ready = False

    @property
    def engine(self) -> DockerEngine:
        """The engine of all attempts: it bounds the calls of a worker, and not of each attempt.

        Raises UsageError as `DockerEngine` does.
        """
        self._engine = self._engine or DockerEngine()
        return self._engine

    async def aclose(self) -> None:
        """Closes the connections to the engine."""
        if self._engine is not None:
            await self._engine.aclose()

    def lifetime(self, wanted_s: float) -> int:
        """Returns the seconds that containers live. Raises UsageError if that is too long here."""
        return self.ceilings.lifetime(max(1, int(wanted_s) + 1), self._whose)

    async def open(self, deadline_s: int) -> None:
        """Checks the engine, and pulls and pins the images. The worker takes no episode before.

        `deadline_s` is the recipe's. Raises DependencyError if the engine can't be reached,
        UsageError if it is not suitable.
        """
        self.ceilings.require_deadline(deadline_s, self._whose)
        try:
            await self.ready()
        except InfrastructureError as error:
            raise DependencyError(
                f"{self._whose}: the Docker engine at {self.engine.host} can't be used ({error}). "
                "Start it, and let this user open its socket"
            ) from error

    async def ready(self) -> None:
        """Checks the engine, pins the images, and removes what killed workers left.

        Later calls do nothing.
        """
        async with self._checking:
            if self._ready:
                return
            engine = self.engine
            if not engine.local:
                raise UsageError(
                    "the agent's option `container` shares a folder with the Docker engine, so the "
                    "engine must be on this host and reached by its Unix socket, but DOCKER_HOST "
                    f"or the Docker context names {engine.host}"
                )
            info, runtime = await engine.info(), self.settings.runtime
            isolation = require_engine(info, runtime, self.ceilings, self._whose)
            for image in {self.settings.image, self.settings.relay_image}:
                await self.images.pin(engine, image)
            await asyncio.to_thread(sweep_folders)
            await sweep_containers(engine)
            self._ready = True
            logger.info("%s: containers have %s", self._whose, isolation)


class SocketFolder:
    """The folder that both sides share: the gateway's socket, the lifeline and the input.

    It lies in a folder that only the worker's user may enter. The containers' users may do what the
    modes below say, because the engine mounts it for them.
    """

    def __init__(self, path: Path, given: bytes) -> None:
        path.mkdir()
        path.chmod(0o755)
        (path / EPISODE).write_bytes(given)
        (path / EPISODE).chmod(0o644)
        self.path = path
        self.gateway = path / "gateway"
        """The socket on which the gateway must listen."""
        self._ready = asyncio.Event()
        self._held: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Accepts the relay. The gateway must listen already."""
        lifeline = self.path / LIFELINE
        self._server = await asyncio.start_unix_server(self._hold, lifeline)
        for path in (self.gateway, lifeline):  # the containers' user is not ours
            path.chmod(0o666)

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Holds the relay's connection. Others, such as those of a sweep, say nothing."""
        self._held.append(writer)
        if await reader.readline() and not self._ready.is_set():
            self._ready.set()
        else:
            self._held.remove(writer)
            writer.close()

    async def wait(self, image: str) -> None:
        """Waits until the relay listens. Raises InfrastructureError if it doesn't."""
        try:
            async with asyncio.timeout(READY_S):
                await self._ready.wait()
        except TimeoutError as error:
            said = f"the relay in a container of {image} did not listen within {READY_S:g} s"
            raise InfrastructureError("relay_silent", said) from error

    def close(self) -> None:
        """Ends the lifeline, and with it the relay and the program."""
        if self._server is not None:
            self._server.close()
        for writer in self._held:
            writer.close()


@asynccontextmanager
async def socket_folder(given: bytes) -> AsyncIterator[SocketFolder]:
    """Yields a folder for one attempt, and removes it at the end."""
    with tempfile.TemporaryDirectory(prefix=FOLDER) as private:  # its mode is 0700
        folder = SocketFolder(Path(private) / SHARED, given)
        try:
            yield folder
        finally:
            folder.close()


def sweep_folders() -> None:
    """Removes the folders of workers that were killed: nothing listens on their lifelines.

    It connects to every attempt on this host, so a worker does this once.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        if not _is_ours(folder):
            continue
        with socket.socket(socket.AF_UNIX) as lifeline:
            try:
                lifeline.connect(str(folder / SHARED / LIFELINE))
            except ConnectionRefusedError:
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:  # the lifeline doesn't exist yet
                continue


def _is_ours(folder: Path) -> bool:
    """Whether this user made a folder: in /tmp anybody may make one of that name."""
    try:
        found = folder.lstat()
    except FileNotFoundError:  # its attempt has ended
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


async def sweep_containers(engine: DockerEngine) -> None:
    """Removes containers of killed workers that never started: the engine removes all others."""
    for found in await engine.containers({LABEL: "command", DEADLINE: ""}):
        if float(found["Labels"][DEADLINE]) + OVERDUE_S < now():
            await engine.remove(found["Id"])


@asynccontextmanager
async def contained(
    containers: AgentContainers,
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: str | None,
    folder: SocketFolder,
    live_s: float,
) -> AsyncIterator[asyncio.Task[Ended]]:
    """Runs a command in a container of its own, for at most `live_s` seconds.

    The gateway must listen in the folder. Yields a task that returns how the command ended. Raises
    InfrastructureError if the engine can't run it.
    """
    settings, images, engine = containers.settings, containers.images, containers.engine
    name = f"headrace-agent-{uuid.uuid4().hex}"
    relay, program = f"{name}-relay", f"{name}-program"
    watching: asyncio.Task[Ended] | None = None
    try:
        await containers.ready()
        await folder.open()
        seconds = containers.lifetime(live_s)
        of_relay, of_program = images[settings.relay_image], images[settings.image]
        body = _relay(settings, of_relay, folder.path, seconds)
        # A cancelled call goes on at the engine: what it makes must be there to be removed.
        await finish(images.create(engine, relay, body), "the start of a relay")
        await folder.wait(settings.relay_image)
        body = _program(settings, of_program, relay, folder.path, environment, seconds)
        await finish(images.create(engine, program, body), "the start of a program")
        watching = asyncio.create_task(_watch(engine, program, command, cwd or WORK))
        yield watching
    finally:
        folder.close()  # first, since the rest may be interrupted
        if watching is not None:
            watching.cancel()
            await asyncio.wait({watching})
        await asyncio.gather(engine.remove(program), engine.remove(relay), return_exceptions=True)


def _body(limits: Limits, image: PinnedImage, shared: str, live_s: int) -> dict[str, Any]:
    labels = {DEADLINE: f"{now() + live_s:.0f}", LABEL: "command"}
    body = container(limits, image.digest, labels | image.labels, live_s)
    body["HostConfig"] |= {"AutoRemove": True, "Binds": [shared]}
    return body


def _relay(
    settings: ContainerSettings, image: PinnedImage, folder: Path, live_s: int
) -> dict[str, Any]:
    limits = RELAY_LIMITS.model_copy(update={"runtime": settings.runtime})
    body = _body(limits, image, f"{folder}:{MOUNTED}:ro", live_s)
    run = ["python3", "-I", "-S", "-c", RELAY.read_text(), str(PORT), MOUNTED]
    return body | {"Entrypoint": run[:1], "Cmd": run[1:]}


def _program(
    settings: ContainerSettings,
    image: PinnedImage,
    relay: str,
    folder: Path,
    environment: Mapping[str, str],
    live_s: int,
) -> dict[str, Any]:
    # The sockets are the relay's alone: it bounds the connections of the policy's code.
    given = f"{folder / EPISODE}:{MOUNTED}/{EPISODE}:ro"
    body = _body(settings, image, given, live_s)
    # The program has the relay's host name and network, so the engine refuses its own.
    del body["Hostname"], body["NetworkDisabled"]
    body["Env"] = [*body["Env"], *(f"{name}={value}" for name, value in environment.items())]
    body["HostConfig"] |= {
        "NetworkMode": f"container:{relay}",
        "PidMode": f"container:{relay}",
        "Init": False,
    }
    return body


async def _watch(engine: DockerEngine, name: str, command: Sequence[str], folder: str) -> Ended:
    """Runs the command, and keeps the end of its output."""
    given = f'exec "$@" <{MOUNTED}/{EPISODE}'
    async with engine.run(name, ("sh", "-c", given, "sh", *command), USER, folder) as (run, output):
        said, errors = await _tails(output)
    code = await engine.exit_code(run)
    return Ended(KILLED if code is None else code, said, errors)


async def _tails(output: Output) -> tuple[str, str]:
    tails = {True: b"", False: b""}
    while chunk := await output.read():
        wrong = output.stream == STDERR
        tails[wrong] = (tails[wrong] + chunk)[-TAIL_BYTES:]
    return tails[False].decode(errors="replace"), tails[True].decode(errors="replace")
