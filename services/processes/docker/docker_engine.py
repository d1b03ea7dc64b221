"""The Docker engine, through the Docker SDK for Python. Nothing else speaks to it.

The SDK blocks, so its calls run in a few threads. A command's output needs no thread: asyncio
reads it from the socket that the SDK returns. Thousands can be open, and any of them can be given
up at any time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.concurrency import in_daemon_thread
from headrace.services.processes.call_turns import CallTurns
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.docker.docker_output import Output
from headrace.services.processes.docker.hardened import USER
from headrace.services.processes.docker.ssh_forward import SshForward, is_ssh, read_ssh_address

if TYPE_CHECKING:
    from docker import APIClient

    from headrace.services.processes.docker.docker_client import DockerClient

__all__ = ["Conflict", "DockerEngine", "NotThere", "Output"]

T = TypeVar("T")

CALLS = 32
"""Most calls at the same time, each in a thread of its own."""
CALL_S = 60
"""Seconds that the engine has for one call. A busy host takes several to start a container."""
PULL_S = 900
"""Seconds that an image has to be pulled."""
KILLED, NOTED_S = 137, 1.0
"""The exit code of what SIGKILL ended, and the seconds until the engine has noted who sent it."""


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
        self._found = found
        self._client: APIClient | None = None
        self._client_url = ""
        self._connecting = asyncio.Lock()
        self._forward = SshForward(read_ssh_address(found.url)) if is_ssh(found.url) else None
        self._turns = CallTurns(CALLS)
        self._closed = False

    async def aclose(self) -> None:
        """Closes its connections. What runs in containers goes on."""
        self._closed = True
        if self._client is not None:
            self._client.close()
        if self._forward is not None:
            await self._forward.aclose()

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

    async def out_of_memory(self, name: str) -> bool:
        """Returns whether a container that does not run ended because its memory was used up.

        `OOMKilled` also stays from a process that the kernel killed earlier. So it does not count
        if somebody has killed the container: the engine's newest events say that.
        """
        found = await self.inspect(name)
        state = found["State"]
        if not state.get("OOMKilled") or state.get("ExitCode") != KILLED:
            return False
        began, ended = (
            datetime.fromisoformat(state[key]).timestamp() for key in ("StartedAt", "FinishedAt")
        )
        which: dict[str, Any] = {"since": f"{began:.6f}", "until": f"{ended + NOTED_S:.6f}"}
        which["filters"] = {"container": found["Id"], "event": "kill"}
        kills = await self._call(
            f"look who killed {name}", lambda client: list(client.events(decode=True, **which))
        )
        return all(one["Actor"]["Attributes"].get("signal") != "9" for one in kills)

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
        found = await self._call(
            "list containers", lambda client: client.containers(all=True, filters=filters)
        )
        # If one is renamed while it is removed, the engine lists it for ever, without a name.
        return [one for one in found if one["Names"]]

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
        used: list[APIClient] = []

        def ping(client: APIClient) -> None:
            if client is not used[0]:
                message = f"{self.host}: the connection was lost while a command ran"
                raise InfrastructureError("engine_unreachable", message)
            client.ping()

        async def confirm() -> None:
            await self._call("confirm the connection", ping)

        # If ssh ends, the output ends too, but the command goes on.
        output = Output(self.host, confirm if self._forward else None)

        def begin(client: APIClient) -> str:
            used.append(client)
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

        The time in which it waits for its turn does not count, as long as the engine answers other
        calls. `what` names the call in errors.
        """
        from headrace.services.processes.docker.docker_client import SDK_ERRORS, failed

        limit_s = limit_s or CALL_S
        if self._closed:
            raise InfrastructureError("engine_closed", "the worker is ending")
        call, began = f"{self.host}: {what}", asyncio.get_running_loop().time()
        try:
            await self._turns.take(CALL_S)
            started: Future[T] | None = None
            try:
                async with asyncio.timeout(limit_s):
                    async with self._connecting:
                        client = await self._connected()
                    started = self._in_thread(lambda: function(client))
                    return await asyncio.wrap_future(started)
            finally:
                if started is None:
                    self._turns.end(answered=False)
        except SDK_ERRORS as error:
            said = await self._forward.said_since(began) if self._forward else ""
            raise failed(error, call, limit_s, said) from error

    async def _connected(self) -> APIClient:
        """Returns the client. Connects if it is not connected yet, or not any more."""
        from headrace.services.processes.docker.docker_client import DockerClient

        host = self._found
        if self._forward is not None:
            host = replace(host, url=f"unix://{await self._forward.require()}", tls=False)
            if self._client is not None and host.url != self._client_url:
                self._client.close()
                self._client = None
        if self._client is None:
            self._client_url = host.url
            # The lock bounds these threads, so they need no turn.
            connecting = in_daemon_thread(
                lambda: DockerClient(host, CALLS, CALL_S, PULL_S), "docker"
            )
            try:
                self._client = await asyncio.wrap_future(connecting)
            except asyncio.CancelledError:
                connecting.add_done_callback(_close)
                raise
        return self._client

    def _in_thread(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function in a daemon thread, which does not keep the process from exiting.

        The function goes on to its end if the caller is cancelled, and its result is lost. Its turn
        ends only then.
        """
        loop = asyncio.get_running_loop()

        def end_turn(done: Future[T]) -> None:
            error = None if done.cancelled() else done.exception()
            answered = error is None or isinstance(error, InfrastructureError)
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(partial(self._turns.end, answered=answered))

        future = in_daemon_thread(function, "docker")
        future.add_done_callback(end_turn)
        return future


def _close(connected: Future[DockerClient]) -> None:
    """Closes a client that nobody waits for any more."""
    if not connected.cancelled() and connected.exception() is None:
        connected.result().close()
