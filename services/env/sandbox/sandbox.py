"""A container that runs one command at a time. The worker enforces the limits from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import Field

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.processes.docker.docker_engine import (
    Conflict,
    DockerEngine,
    NotThere,
    Output,
)
from headrace.services.processes.docker.hardened import USER, WORK, Limits, Positive

KILL_S = 30.0
"""Seconds within which a command's processes must be gone after they are killed."""
START_S = 60.0
"""Seconds that a command has to start; a busy host is slow."""
BEGUN = b"begun\n"
STARTED = ("sh", "-c", 'exec 2>&1; echo begun; exec "$@"', "sh")
"""The wrapper of every command. The word that it prints first tells failures of the command from
failures of the engine. It joins both streams, so that their order is kept."""
KILLED = 137
"""Exit code of a killed process: it used too much memory, or its sandbox was killed."""
DYING_S = 5.0
"""Seconds that the engine has to report the end of a sandbox that starts no command."""
SPARE_PIDS = 8
"""Processes that starting a command takes. A sandbox with fewer left is full."""
ARGUMENT_BYTES = 100_000
"""Longest argument of a command. The kernel's limit is 131,072 bytes with the final NUL."""


class SandboxSettings(Limits):
    """The options of a sandbox. Only the recipe sets them: no task can loosen them. The ceilings of
    the worker's host limit them."""

    image: str
    """Image for tasks that name none. It needs `sh` and `sleep`, and `python3` for most tools."""
    images: tuple[str, ...] = ()
    """Further images that tasks may name."""
    tool: str = "shell"
    """What an action is: `shell`, `python`, `coding`, `repair`, or the import path of
    your own Tool."""
    tool_options: dict[str, Any] = Field(default={})
    """Keyword arguments of the tool."""
    network: str = "none"
    """A network of the engine. If it is not `none`, guarding what it reaches is up to you."""
    output_kb: Positive = 16
    """Most of a command's output that is kept, in KiB: its beginning and its end."""
    flood_kb: Positive = 4096
    """A command that writes more than this, in KiB, is killed."""
    command_s: float = Field(default=30.0, gt=0)
    """Seconds that a command may run."""
    lifetime_s: Positive = 3600
    """Seconds after which a persistent sandbox is not used again."""


class SandboxEnded(Exception):
    """A command ended its own sandbox. The policy did that: it is an observation, not a failure."""


class BadArgument(ValueError):
    """The kernel can't take an argument of a command. The policy did that."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    output: str
    """Both streams in the order of their bytes. The middle of a long output is left out."""
    exit_code: int | None
    """None if the worker ended the command."""
    ended: str = ""
    """Why the worker ended it: its time or its output. Empty if it ended by itself."""


class Sandbox:
    """A container in use. Its name says who may use it: see `container_names.py`."""

    def __init__(self, engine: DockerEngine, settings: SandboxSettings, name: InUse) -> None:
        self.name = name
        self._engine = engine
        self._settings = settings

    async def begin(self) -> None:
        """Claim the next action. Raises InfrastructureError if another worker has the sandbox."""
        following = self.name.next()
        try:
            await self._engine.rename(str(self.name), str(following))
        except (NotThere, Conflict) as error:
            raise InfrastructureError("sandbox_lost", error.message) from error
        self.name = following

    async def run(
        self, command: Sequence[str], *, seconds: float | None = None, output_kb: int | None = None
    ) -> Result:
        """Run a command in /workspace as the sandbox's user.

        Raises SandboxEnded if the command took the sandbox down, InfrastructureError if something
        else did, and BadArgument if the command can't be run at all.
        """
        for argument in command:
            _check(argument)
        limit_s = min(seconds or self._settings.command_s, self._settings.command_s)
        kept = _Kept((output_kb or self._settings.output_kb) * 1024)
        try:
            async with self._engine.run(str(self.name), (*STARTED, *command), USER, WORK) as (
                run_id,
                output,
            ):
                await self._started(output, kept)
                ended = await self._read(output, kept, limit_s)
                if ended:
                    await self._kill(output)
            code = None if ended else await self._engine.exit_code(run_id)
        except (NotThere, Conflict) as error:
            await self._fail(str(error).encode())
        if code is None or code == KILLED:
            await self._require_alive()
        return Result(kept.text(), code, ended)

    async def _started(self, output: Output, kept: _Kept) -> None:
        """Wait for the wrapper's word. What comes after it is the command's own output."""
        said = b""
        try:
            async with asyncio.timeout(START_S):
                while len(said) < len(BEGUN) and (chunk := await output.read()):
                    said += chunk
        except TimeoutError:
            said += b"[nothing]"
        if said.startswith(BEGUN):
            kept.add(said[len(BEGUN) :])
            return
        await self._fail(said)

    async def _require_alive(self) -> None:
        """After a command was killed, check that its sandbox was not: another one must start."""
        try:
            async with (
                asyncio.timeout(START_S),
                self._engine.run(str(self.name), (*STARTED, "true"), USER, "/") as (_, output),
            ):
                await self._started(output, _Kept(0))
                await output.drain()
        except (TimeoutError, NotThere, Conflict) as error:
            await self._fail(str(error).encode())

    async def _fail(self, said: bytes) -> NoReturn:
        """Raise the reason why no command can be started."""
        try:
            async with asyncio.timeout(DYING_S):  # its state may lag behind its end
                await self._engine.ended(str(self.name))
        except (TimeoutError, NotThere):
            pass
        await self._require_running()
        if await self._engine.processes(str(self.name)) >= self._settings.pids - SPARE_PIDS:
            raise SandboxEnded("no command can be started: the sandbox is full of processes")
        message = f"a command did not start: {said.decode('utf-8', 'replace')[:500]}"
        raise InfrastructureError("exec_failed", message)

    async def _read(self, output: Output, kept: _Kept, limit_s: float) -> str:
        """Read until the command ends. Return why it must be ended, or an empty text."""
        try:
            async with asyncio.timeout(limit_s):
                while chunk := await output.read():
                    kept.add(chunk)
                    if kept.seen > self._settings.flood_kb * 1024:
                        return f"it wrote more than {self._settings.flood_kb} KiB"
        except TimeoutError:
            return f"it ran for {limit_s:g} s"
        return ""

    async def _kill(self, output: Output) -> None:
        """Kill all processes of the sandbox's user. If that fails, remove the sandbox."""
        try:
            async with asyncio.timeout(KILL_S):
                command = ("sh", "-c", "kill -9 -1")
                async with self._engine.run(str(self.name), command, USER, "/") as (_, said):
                    # Both at once: if nobody reads the output, the engine doesn't notice the end.
                    await asyncio.gather(said.drain(), output.drain())
        except (TimeoutError, InfrastructureError) as error:
            await self._engine.remove(str(self.name))
            raise SandboxEnded("a command could not be ended, and took the sandbox down") from error

    async def _require_running(self) -> None:
        """Raise the exception that says how the container ended, unless it runs."""
        try:
            state = (await self._engine.inspect(str(self.name)))["State"]
        except NotThere as error:
            raise InfrastructureError("sandbox_lost", error.message) from error
        if state.get("OOMKilled") and not state.get("Running"):
            raise SandboxEnded("the sandbox ran out of memory")
        if not state.get("Running"):
            code, reason = state.get("ExitCode"), state.get("Error") or "no reason"
            raise InfrastructureError("sandbox_lost", f"its container ended with {code}: {reason}")


def _check(argument: str) -> None:
    try:
        size = len(argument.encode())
    except UnicodeEncodeError:
        raise BadArgument("it contains half of a surrogate pair") from None
    if size > ARGUMENT_BYTES:
        raise BadArgument(f"it is longer than {ARGUMENT_BYTES:,} bytes")
    if "\0" in argument:
        raise BadArgument("it contains a NUL character")


class _Kept:
    """Keeps the beginning and the end of an output of any length."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._first = bytearray()
        self._last = bytearray()
        self.seen = 0
        """Bytes received so far."""

    def add(self, chunk: bytes) -> None:
        self.seen += len(chunk)
        room = self._half - len(self._first)
        self._first += chunk[:room]
        self._last += chunk[max(0, room) :]
        if len(self._last) > 2 * self._half:
            del self._last[: -self._half]

    def text(self) -> str:
        last = bytes(self._last[-self._half :])
        left_out = self.seen - len(self._first) - len(last)
        middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return (bytes(self._first) + middle + last).decode("utf-8", "replace")
