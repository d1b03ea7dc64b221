"""The Docker engine, through the Docker SDK for Python. Nothing else speaks to it.

The SDK blocks, so its calls run in a few threads. A command's output needs no thread: asyncio
reads it from the socket that the SDK returns. Thousands can be open, and any of them can be given
up at any time.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, TypeVar

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.concurrency import in_daemon_thread, readable
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.docker.hardened import USER

if TYPE_CHECKING:
    from docker import APIClient

__all__ = ["Conflict", "DockerEngine", "NotThere", "Output"]

T = TypeVar("T")

CALLS = 32
"""Most calls at the same time, each in a thread of its own."""
CALL_S = 60
"""Seconds that the engine has for one call. A busy host takes several to start a container."""
PULL_S = 900
"""Seconds that an image has to be pulled."""
HEADER_BYTES = 8
"""The header of one frame of a command's output: stream, three zeros, big-endian length."""
CHUNK_BYTES = 64 * 1024


class DockerEngine:
    """A Docker engine. The first call connects. Its errors are InfrastructureErrors."""

    def __init__(self, host: str | None = None, tls: str = "") -> None:
        """`host` is as in DOCKER_HOST. None means the engine that the command `docker` would use.
        `tls` is a folder with ca.pem, cert.pem and key.pem, if `host` needs them.

        Raises UsageError if the extra is not installed, or the host can't be used.
        """
        try:
            from headrace.services.processes.docker import docker_client as client
        except ImportError as error:
            raise UsageError(
                f"{error.name} is not installed: pip install 'headrace[docker]'"
            ) from None
        found = client.find_host(host, tls)
        self.host = found.url
        self.local = found.local
        """Whether it listens at a Unix socket, so that it should see this host's files."""
        self._connect = lambda: client.DockerClient(found, CALLS, CALL_S, PULL_S)
        self._client: APIClient | None = None
        self._connecting = asyncio.Lock()
        self._turns = asyncio.Semaphore(CALLS)
        self._closed = False

    async def aclose(self) -> None:
        """Closes its connections. What runs in containers goes on."""
        self._closed = True
        if self._client is not None:
            self._client.close()

    def policy_user(self, name: str) -> str:
        """Returns the number of the user that runs a container's commands."""
        return USER.partition(":")[0]

    async def info(self) -> Mapping[str, Any]:
        """Returns the engine's description of itself."""
        return await self._call("info", lambda client: client.info())

    async def image(self, name: str) -> Mapping[str, Any]:
        """Returns an image's description. Raises NotThere if the engine does not have it."""
        return await self._call(f"inspect image {name}", lambda client: client.inspect_image(name))

    async def pull(self, name: str, limit_s: float | None = None) -> None:
        """Pulls an image, with the credentials that the command `docker` would use.

        It may take `limit_s` seconds, or PULL_S. Raises InfrastructureError `pull_failed` with the
        registry's answer.
        """
        given_up = threading.Event()

        def pull(client: APIClient) -> None:
            for line in client.pull(name, stream=True, decode=True):
                if error := line.get("error"):
                    raise InfrastructureError("pull_failed", str(error))
                if given_up.is_set():
                    return

        try:
            await self._call(f"pull {name}", pull, limit_s or PULL_S)
        except NotThere as error:
            raise InfrastructureError("pull_failed", error.message) from error
        finally:
            given_up.set()

    async def tag(self, image: str, repository: str, tag: str) -> None:
        """Gives an image one more name."""
        await self._call(f"tag {image}", lambda client: client.tag(image, repository, tag))

    async def remove_image(self, name: str) -> None:
        """Removes a name of an image, and with its last name the image.

        Raises NotThere if there is no such name, and Conflict if a container uses the image.
        """
        await self._call(f"remove image {name}", lambda client: client.remove_image(name))

    async def disk_usage(self) -> Mapping[str, Any]:
        """Returns what images, containers and volumes take. It takes the engine a while."""
        return await self._call("measure the disk", lambda client: client.df())

    async def create(self, name: str, configuration: Mapping[str, Any]) -> None:
        """Creates a container and starts it. Raises Conflict if the name is taken."""
        await self.prepare(name, configuration)
        await self._call(f"start {name}", lambda client: client.start(name))

    async def prepare(self, name: str, configuration: Mapping[str, Any]) -> None:
        """Creates a container without starting it."""
        body = dict(configuration)
        await self._call(
            f"create {name}", lambda client: client.create_container_from_config(body, name)
        )

    async def restart(self, name: str) -> None:
        """Restarts a container. All that ran in it ends, and its tmpfs mounts are empty."""
        await self._call(f"restart {name}", lambda client: client.restart(name, timeout=0))

    async def rename(self, name: str, new: str) -> None:
        """Raises NotThere if no container has that name, and Conflict if `new` is taken."""
        await self._call(f"rename {name}", lambda client: client.rename(name, new))

    async def ended(self, name: str) -> None:
        """Waits until a container does not run. The caller bounds the time."""
        # It polls, because a call that waits would occupy a thread.
        while (await self.inspect(name))["State"].get("Running"):
            await asyncio.sleep(0.1)

    async def inspect(self, name: str) -> Mapping[str, Any]:
        """Returns a container's state. Raises NotThere if there is no such container."""
        return await self._call(f"inspect {name}", lambda client: client.inspect_container(name))

    async def containers(
        self, labels: Mapping[str, str], name: str = "", ancestor: str = ""
    ) -> list[Mapping[str, Any]]:
        """Returns containers, running or not, by labels, a pattern of names, and their image.

        An empty value of a label means any value.
        """
        wanted = [f"{key}={value}" if value else key for key, value in labels.items()]
        filters = {"label": wanted}
        filters |= {"name": [name]} if name else {}
        filters |= {"ancestor": [ancestor]} if ancestor else {}
        return await self._call(
            "list containers", lambda client: client.containers(all=True, filters=filters)
        )

    async def remove(self, name: str) -> None:
        """Kills and removes a container with its volumes, unless it is already gone or going."""
        with suppress(NotThere, Conflict):
            await self._call(
                f"remove {name}", lambda client: client.remove_container(name, v=True, force=True)
            )

    @asynccontextmanager
    async def run(
        self,
        name: str,
        command: Sequence[str],
        user: str,
        folder: str,
        given: IO[bytes] | None = None,
    ) -> AsyncIterator[tuple[str, Output]]:
        """Begins a command in a container. Yields the command's id and its output.

        It gets the bytes of `given` at its stdin, but no end of the file: a connection by TLS can't
        be closed in one direction. It should write little before it has read them.
        """
        output = Output(self.host)

        def begin(client: APIClient) -> str:
            made = client.exec_create(
                name, list(command), stdin=given is not None, user=user, workdir=folder
            )
            output.open(client.exec_start(made["Id"], socket=True), given)
            return str(made["Id"])

        try:
            yield await self._call(f"run a command in {name}", begin), output
        finally:
            output.close()

    async def exit_code(self, command: str) -> int | None:
        """Returns a command's exit code, or None if it still runs or the engine does not know."""
        found = await self._call(
            f"inspect command {command}", lambda client: client.exec_inspect(command)
        )
        code = found.get("ExitCode")
        return None if found.get("Running") or code is None else int(code)

    async def usage(self, name: str) -> tuple[int, int]:
        """Returns the number of a container's processes and threads, and its memory in bytes.

        The memory is without files that the kernel may drop from its cache.
        """

        def measure(client: APIClient) -> Any:
            try:
                return client.stats(name, stream=False, one_shot=True)
            except ValueError as error:  # no JSON: the container is being removed
                raise NotThere("sandbox_lost", f"container {name} is gone") from error

        found = await self._call(f"measure {name}", measure)
        memory = found.get("memory_stats", {})
        details = memory.get("stats", {})
        cached = details.get("total_inactive_file", details.get("inactive_file", 0))
        processes = found.get("pids_stats", {}).get("current", 0)
        return int(processes), int(memory.get("usage", 0)) - int(cached)

    async def _call(
        self, what: str, function: Callable[[APIClient], T], limit_s: float | None = None
    ) -> T:
        """Runs a function of the client in a thread, for at most CALL_S unless `limit_s` is given.

        `what` names the call in errors.
        """
        from headrace.services.processes.docker.docker_client import SDK_ERRORS, failed

        limit_s = limit_s or CALL_S
        if self._closed:
            raise InfrastructureError("engine_closed", "the worker is ending")
        call = f"{self.host}: {what}"
        try:
            async with asyncio.timeout(limit_s):
                async with self._connecting:
                    if self._client is None:
                        self._client = await self._in_thread(self._connect)
                client = self._client
                return await self._in_thread(lambda: function(client))
        except SDK_ERRORS as error:
            raise failed(error, call, limit_s) from error

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Runs a function in a daemon thread, which does not keep the process from exiting.

        If the caller is cancelled, a function that waits for its turn is not run at all. One that
        runs already goes on to its end, and its result is lost.
        """
        loop = asyncio.get_running_loop()

        def end_turn(_: object) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(self._turns.release)

        await self._turns.acquire()
        future = in_daemon_thread(function, "docker")
        future.add_done_callback(end_turn)
        return await asyncio.wrap_future(future)


class Output:
    """What a command without a terminal writes, both streams as they come.

    https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach
    """

    def __init__(self, host: str) -> None:
        self.stream = 0
        """Where the bytes that were read last were written: 1 for stdout, 2 for stderr."""
        self._host = host
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
        self._socket.settimeout(CALL_S)
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
                self._received += received
                return len(received)
