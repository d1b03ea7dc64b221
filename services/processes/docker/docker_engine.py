"""The Docker engine, by its HTTP API on a Unix socket. Nothing else speaks to it.

Spoken to directly: a command's output is a stream that must be readable in thousands at once and
given up at any moment, which a blocking client can only do with a thread for each.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headrace.errors import InfrastructureError, UsageError

CALL_S = 60.0
"""Seconds that the engine has for one call; a busy host takes several to start a container."""
PULL_S = 900.0
"""Seconds that an image has to be pulled."""
HEADER_BYTES = 8
"""Of one frame of a command's output: stream, three zeros, big-endian length."""
CHUNK_BYTES = 64 * 1024


class NotThere(InfrastructureError):
    """No such container, image or command: or no longer, or not under that name."""


class Conflict(InfrastructureError):
    """It can't be done as things stand: a name is taken, a container doesn't run."""


class Engine:
    """A Docker engine. Open it before use. Its errors are InfrastructureErrors."""

    def __init__(self, host: str | None = None) -> None:
        """`host` as in DOCKER_HOST, which it defaults to. UsageError unless it's a Unix socket."""
        self.host = host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
        scheme, _, path = self.host.partition("://")
        if scheme != "unix" or not path:
            raise UsageError(
                f"DOCKER_HOST={self.host}: sandboxes need the engine's Unix socket, as "
                "unix:///var/run/docker.sock. Bring a remote one here: ssh -L "
                "/run/remote.sock:/var/run/docker.sock HOST"
            )
        self._path = path
        self._session: Any = None

    async def open(self) -> None:
        """Makes the client. UsageError where the extra isn't installed."""
        try:
            import aiohttp
        except ImportError:
            raise UsageError("aiohttp is not installed: pip install 'headrace[docker]'") from None
        # No limit here: the environments' slots are the bound of what runs at once.
        connector = aiohttp.UnixConnector(path=self._path, limit=0)
        self._session = aiohttp.ClientSession(connector=connector)

    async def aclose(self) -> None:
        """Closes its connections. What runs in containers goes on."""
        if self._session is not None:
            await self._session.close()

    async def info(self) -> Mapping[str, Any]:
        """What the engine says of itself."""
        found: Mapping[str, Any] = await self._call("GET", "/info")
        return found

    async def image(self, name: str) -> Mapping[str, Any]:
        """An image's description. NotThere where the engine doesn't have it."""
        found: Mapping[str, Any] = await self._call("GET", f"/images/{name}/json")
        return found

    async def pull(self, name: str) -> None:
        """Pulls an image. InfrastructureError `pull_failed` says what the registry said."""
        tagged = name if ":" in name.rpartition("/")[2] or "@" in name else f"{name}:latest"
        try:
            async with self._stream(
                "POST", "/images/create", query={"fromImage": tagged}, limit_s=PULL_S
            ) as response:
                async for line in response.content:
                    if (said := json.loads(line)).get("error"):
                        raise InfrastructureError("pull_failed", str(said["error"]))
        except NotThere as error:
            raise InfrastructureError("pull_failed", error.message) from error

    async def create(self, name: str, configuration: Mapping[str, Any]) -> None:
        """Makes a container and starts it. Conflict where the name is taken."""
        await self._call("POST", "/containers/create", query={"name": name}, body=configuration)
        await self._call("POST", f"/containers/{name}/start")

    async def restart(self, name: str) -> None:
        """Ends all that runs in a container and starts it anew: its tmpfs mounts are empty."""
        await self._call("POST", f"/containers/{name}/restart", query={"t": "0"})

    async def rename(self, name: str, new: str) -> None:
        """Renames a container. NotThere where it has that name no longer, Conflict if `new` is."""
        await self._call("POST", f"/containers/{name}/rename", query={"name": new})

    async def ended(self, name: str) -> None:
        """Waits until a container doesn't run. The caller bounds it."""
        await self._call("POST", f"/containers/{name}/wait")

    async def inspect(self, name: str) -> Mapping[str, Any]:
        """A container's state. NotThere where there is none."""
        found: Mapping[str, Any] = await self._call("GET", f"/containers/{name}/json")
        return found

    async def containers(
        self, labels: Mapping[str, str], name: str = ""
    ) -> list[Mapping[str, Any]]:
        """Containers, running or not, by labels (an empty value: any) and a pattern of names."""
        wanted = [f"{key}={value}" if value else key for key, value in labels.items()]
        filters = {"label": wanted, **({"name": [name]} if name else {})}
        query = {"all": "1", "filters": json.dumps(filters)}
        found: list[Mapping[str, Any]] = await self._call("GET", "/containers/json", query=query)
        return found

    async def remove(self, name: str) -> None:
        """Kills and removes a container with its volumes. Silent where it is gone or going."""
        try:
            await self._call("DELETE", f"/containers/{name}", query={"force": "1", "v": "1"})
        except (NotThere, Conflict):
            return

    @asynccontextmanager
    async def run(
        self, name: str, command: Sequence[str], user: str, folder: str
    ) -> AsyncIterator[tuple[str, Output]]:
        """Begins a command in a container: its id, and its output, both streams as they come."""
        made = await self._call(
            "POST",
            f"/containers/{name}/exec",
            body={
                "AttachStdout": True,
                "AttachStderr": True,
                "Cmd": list(command),
                "User": user,
                "WorkingDir": folder,
            },
        )
        async with self._stream("POST", f"/exec/{made['Id']}/start", body={}) as response:
            yield made["Id"], Output(response.content)

    async def exit_code(self, command: str) -> int | None:
        """How a command ended; None where it still runs, or the engine doesn't know."""
        found = await self._call("GET", f"/exec/{command}/json")
        code = found.get("ExitCode")
        return None if found.get("Running") or code is None else int(code)

    async def processes(self, name: str) -> int:
        """How many processes and threads a container holds."""
        query = {"stream": "false", "one-shot": "true"}
        found = await self._call("GET", f"/containers/{name}/stats", query=query)
        return int(found.get("pids_stats", {}).get("current", 0))

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        async with self._stream(method, path, query=query, body=body, limit_s=CALL_S) as response:
            text = await response.text()
            return json.loads(text) if text.strip() else None

    @asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        limit_s: float | None = None,
    ) -> AsyncIterator[Any]:
        """A call's response. Without `limit_s` the caller bounds how long it streams."""
        import aiohttp

        if self._session is None:
            raise InfrastructureError("engine_closed", "the worker is ending")
        limit = aiohttp.ClientTimeout(total=limit_s)
        url = f"http://engine{path}"
        try:
            async with self._session.request(
                method, url, params=query, json=body, timeout=limit
            ) as response:
                if response.status >= 400:
                    raise _refused(response.status, await response.text(), f"{method} {path}")
                yield response
        except TimeoutError as error:
            message = f"{self.host} did not answer {method} {path} in {limit_s} s"
            raise InfrastructureError("engine_silent", message) from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"{self.host}: {type(error).__name__}: {error}"
            raise InfrastructureError("engine_unreachable", message) from error


class Output:
    """What a command without a terminal writes, both streams as they come.

    https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach
    """

    def __init__(self, content: Any) -> None:
        self._content = content
        self._left = 0
        self.stream = 0
        """Where the bytes that were read last were written: 1 is stdout, 2 stderr."""

    async def read(self) -> bytes:
        """The next bytes; none once the command has ended. May be given up and called again."""
        if not self._left:
            try:
                header = await self._content.readexactly(HEADER_BYTES)
            except asyncio.IncompleteReadError:
                return b""
            self.stream, self._left = header[0], int.from_bytes(header[4:], "big")
        chunk: bytes = await self._content.read(min(self._left, CHUNK_BYTES))
        self._left -= len(chunk)
        return chunk

    async def drain(self) -> None:
        """Reads to the end of the command."""
        while await self.read():
            pass


def _refused(status: int, text: str, call: str) -> InfrastructureError:
    try:
        message = str(json.loads(text)["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        message = text
    message = f"{call}: {message.strip()}"[:1000]
    if "no space left on device" in message:
        return InfrastructureError("no_space", message)
    if status == 404:
        return NotThere("sandbox_lost", message)
    # A command that is to begin in a container while that is being removed: the engine's error 500.
    if status in (400, 409) or "is not running" in message:
        return Conflict("sandbox_conflict", message)
    return InfrastructureError("engine_error", message)
