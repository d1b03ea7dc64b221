"""A container that runs one command at a time. The worker enforces the limits from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import Any

from pydantic import Field

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.command_start import (
    KILL,
    CommandStart,
    SandboxEnded,
)
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.env.sandbox.kept_output import KeptOutput
from headrace.services.env.sandbox.workspace_copy import SPOOL_BYTES, pack, unpack
from headrace.services.processes.docker.docker_engine import (
    Conflict,
    DockerEngine,
    NotThere,
    Output,
)
from headrace.services.processes.docker.hardened import USER, Limits, Positive

SIGNALLED = 128
"""Exit codes above it may mean that a signal ended the wrapper."""
KILL_S = 30.0
"""Seconds within which a command's processes must be gone after they are killed."""
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
    keep_processes: bool = False
    """Whether processes go on when their command ends, such as a server that later commands use. If
    they keep a command from beginning, the policy is responsible."""


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

    def __init__(
        self,
        engine: DockerEngine,
        settings: SandboxSettings,
        name: InUse,
        fresh: Callable[[], AbstractAsyncContextManager[Sandbox]],
    ) -> None:
        """`fresh` makes another sandbox of the same attempt, and removes it at the end."""
        self.name = name
        self._engine = engine
        self._settings = settings
        self._fresh = fresh
        self._turn = asyncio.Lock()

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
        """Run a command in /workspace as the sandbox's user, one at a time.

        What it leaves running is killed, unless the recipe has `keep_processes`. Raises
        SandboxEnded if the policy took the sandbox down, InfrastructureError if something else did,
        and BadArgument if the command can't be run at all.
        """
        for argument in command:
            _check(argument)
        limit_s = min(seconds or self._settings.command_s, self._settings.command_s)
        kept = KeptOutput((output_kb or self._settings.output_kb) * 1024)
        code, ended = None, ""
        async with self._turn, AsyncExitStack() as stack:
            run_id, output, first = await self._start().begin(stack, command)
            kept.add(first)
            try:
                ended = await self._read(output, kept, limit_s)
                if ended:
                    await self._kill(output)
                else:
                    code = await self._engine.exit_code(run_id)
            except (NotThere, Conflict) as error:
                await self._start().judge(str(error))
            if code is None or code > SIGNALLED:
                await self._require_usable(stack)
        return Result(kept.text(), code, ended)

    @asynccontextmanager
    async def fresh_copy(self, *, files: bool = True) -> AsyncIterator[Sandbox]:
        """Yield a fresh sandbox with a copy of /workspace: use it to grade what the policy made.

        Nothing else of this sandbox is in it: no process, nothing in /tmp. It is of the same image,
        and is removed at the end. Without `files` its /workspace is empty. Raises SandboxEnded if
        the policy made its files uncopyable: with more than `disk_mb`, holes included.
        """
        with SpooledTemporaryFile(SPOOL_BYTES) as archive:
            if files:
                async with self._turn:
                    await pack(self._start(), self._settings.disk_mb, archive)
            async with self._fresh() as fresh:
                if files:
                    await unpack(fresh._start(), archive)
                yield fresh

    def _start(self) -> CommandStart:
        return CommandStart(self._engine, str(self.name), self._settings, self._keeps)

    async def _require_usable(self, stack: AsyncExitStack) -> None:
        """Raise as `run` does if the sandbox is gone, or if the policy killed the wrapper.

        What then lives on could stop the next command while the engine starts it.
        """
        if self._keeps:
            _, output, _ = await self._start().begin(stack, ("true",))
            await output.drain()
        else:
            await self._start().require_alone()

    @property
    def _keeps(self) -> bool:
        return self._settings.keep_processes and not self.name.copy

    async def _read(self, output: Output, kept: KeptOutput, limit_s: float) -> str:
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
        """Kill all processes of the sandbox's user. If that fails, remove the sandbox.

        They may stop the command that kills them, so that the engine can't even remove it. Then the
        sandbox ends at its deadline.
        """
        try:
            async with asyncio.timeout(KILL_S):
                command = ("sh", "-c", KILL)
                async with self._engine.run(str(self.name), command, USER, "/") as (_, said):
                    # Both at once: if nobody reads the output, the engine doesn't notice the end.
                    await asyncio.gather(said.drain(), output.drain())
        except TimeoutError as error:
            with suppress(InfrastructureError, TimeoutError):
                async with asyncio.timeout(KILL_S):
                    await self._engine.remove(str(self.name))
            raise SandboxEnded("a command could not be ended, and took the sandbox down") from error


def _check(argument: str) -> None:
    try:
        size = len(argument.encode())
    except UnicodeEncodeError:
        raise BadArgument("it contains half of a surrogate pair") from None
    if size > ARGUMENT_BYTES:
        raise BadArgument(f"it is longer than {ARGUMENT_BYTES:,} bytes")
    if "\0" in argument:
        raise BadArgument("it contains a NUL character")
