"""One container: commands run in it, one at a time, within limits that are kept from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.env.sandbox.sandbox_settings import SandboxSettings
from headrace.services.processes.docker.docker_engine import Conflict, Engine, NotThere, Output
from headrace.services.processes.docker.hardened import USER, WORK

KILL_S = 30.0
"""Seconds that a command's processes have to be gone once they are killed."""
START_S = 60.0
"""Seconds that a command has to begin: a busy host takes some."""
BEGUN = b"begun\n"
STARTED = ("sh", "-c", 'exec 2>&1; echo begun; exec "$@"', "sh")
"""What a command is run by: a word before it tells its failures from the engine's. Its streams are
one, and in order."""
KILLED = 137
"""The exit code of what was killed: for its memory, or with its sandbox."""
DYING_S = 5.0
"""Seconds after which a sandbox that takes no command should be known to be dead."""
SPARE_PIDS = 8
"""A sandbox that has fewer processes left than starting a command takes is full."""
ARGUMENT_BYTES = 100_000
"""Longest argument of a command; the kernel takes 131,072 bytes, the end of text included."""


class SandboxEnded(Exception):
    """What ran in the sandbox made its end: the policy's doing, an observation, no failure."""


class BadArgument(ValueError):
    """A command has an argument that the kernel doesn't take: the policy's doing."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a command."""

    output: str
    """Both streams, as they came; the middle left out where it is long."""
    exit_code: int | None
    """None where the command was ended."""
    ended: str = ""
    """Why it was ended: its time or its output; empty where it ended by itself."""


class Sandbox:
    """A container in use. Its name is the claim to it: see `names.py`."""

    def __init__(self, engine: Engine, settings: SandboxSettings, name: InUse, instance: str):
        self.instance = instance
        """Its id in the topic `instances`."""
        self.name = name
        self._engine = engine
        self._settings = settings

    async def begin(self) -> None:
        """Claims the next action. InfrastructureError where another worker has the sandbox."""
        following = self.name.next()
        try:
            await self._engine.rename(str(self.name), str(following))
        except (NotThere, Conflict) as error:
            raise InfrastructureError("sandbox_lost", error.message) from error
        self.name = following

    async def run(
        self, command: Sequence[str], *, seconds: float | None = None, output_kb: int | None = None
    ) -> Result:
        """Runs a command as the sandbox's user in /workspace.

        SandboxEnded where it took the sandbox down, InfrastructureError where something else did,
        BadArgument where it can't be run at all.
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
        """Waits for the word that the command has begun: what comes after it is its own doing."""
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
        """After a command was killed, makes sure that its sandbox was not: another one must run."""
        said = b""
        try:
            async with (
                asyncio.timeout(START_S),
                self._engine.run(str(self.name), (*STARTED, "true"), USER, "/") as (_, output),
            ):
                said = await output.read()
                await output.drain()
        except (TimeoutError, NotThere, Conflict) as error:
            said = str(error).encode()
        if not said.startswith(BEGUN):
            await self._fail(said)

    async def _fail(self, said: bytes) -> NoReturn:
        """Says why no command can be started, once it is known."""
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
        """Reads until the command ends. Returns why it must be ended, or nothing."""
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
        """Kills all of the sandbox's user. Where that fails the sandbox ends with them."""
        try:
            async with asyncio.timeout(KILL_S):
                command = ("sh", "-c", "kill -9 -1")
                async with self._engine.run(str(self.name), command, USER, "/") as (_, said):
                    # At once: an engine whose output nobody reads doesn't see what ends.
                    await asyncio.gather(said.drain(), output.drain())
        except (TimeoutError, InfrastructureError) as error:
            await self._engine.remove(str(self.name))
            raise SandboxEnded("a command could not be ended, and took the sandbox down") from error

    async def _require_running(self) -> None:
        try:
            state = (await self._engine.inspect(str(self.name)))["State"]
        except NotThere as error:
            raise InfrastructureError("sandbox_lost", error.message) from error
        if not state.get("Running"):
            raise _gone(state)


def _check(argument: str) -> None:
    try:
        size = len(argument.encode())
    except UnicodeEncodeError:
        raise BadArgument("it holds half a character") from None
    if size > ARGUMENT_BYTES:
        raise BadArgument(f"it is longer than {ARGUMENT_BYTES:,} bytes")
    if "\0" in argument:
        raise BadArgument("it holds a NUL")


def _gone(state: dict[str, object]) -> Exception:
    """What a dead container's state says of its end."""
    if state.get("OOMKilled"):
        return SandboxEnded("the sandbox ran out of memory")
    message = f"its container ended with {state.get('ExitCode')}: {state.get('Error') or 'no word'}"
    return InfrastructureError("sandbox_lost", message)


class _Kept:
    """The beginning and the end of an output, however long it is."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._first = bytearray()
        self._last = bytearray()
        self.seen = 0
        """Bytes that came."""

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
