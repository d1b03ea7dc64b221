"""A container that runs one command at a time. The worker enforces the limits from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from tempfile import SpooledTemporaryFile
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headrace.errors import InfrastructureError
from headrace.schemas.recipe.task_settings import Artifacts
from headrace.services.base.types import TaskFile
from headrace.services.env.sandbox.command_start import (
    KILL,
    CommandStart,
    SandboxEnded,
)
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.env.sandbox.kept_output import KeptOutput
from headrace.services.env.sandbox.sandbox_engine import CommandOutput, SandboxEngine
from headrace.services.env.sandbox.workspace_copy import SPOOL_BYTES, pack, unpack
from headrace.services.env.sandbox.workspace_files import (
    CollectedFiles,
    collect_files,
    write_files,
)
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
from headrace.services.processes.docker.hardened import USER, Limits, Positive
from headrace.services.processes.docker.ssh_forward import is_ssh, read_ssh_address
from headrace.services.processes.kubernetes.cluster_address import is_cluster, read_address

NOT_IN_PODS = ("root_mb", "images_gb", "images_unused_h", "pull_submitted")
"""Options that only Docker hosts have."""
SIGNALLED = 128
"""Exit codes above it may mean that a signal ended the wrapper."""
REMEMBERED_S = 240.0
"""Docker forgets a command five to ten minutes after its end, while it still has output perhaps."""
KILL_S = 30.0
"""Seconds within which a command's processes must be gone after they are killed."""
ARGUMENT_BYTES = 100_000
"""Longest argument of a command. The kernel's limit is 131,072 bytes with the final NUL."""


class HostSettings(BaseModel):
    """One engine or cluster of a pool."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """Its address: `unix:///path`, `tcp://host:port` or `ssh://user@host` of a Docker engine, or
    `kubernetes://CONTEXT/NAMESPACE` of a cluster. CONTEXT is one of the worker's kubeconfig.
    Without it, that is the cluster in which the worker runs, or else the current context."""
    slots: Positive
    """Most containers or pods that one worker has on it at once."""
    tls: str = ""
    """Folder of ca.pem, cert.pem and key.pem on the worker's host. Empty means no TLS. The
    kubeconfig has those of a cluster."""

    @field_validator("url")
    @classmethod
    def _keep_passwords_out(cls, url: str) -> str:
        if is_cluster(url):
            read_address(url)
        elif is_ssh(url):
            read_ssh_address(url)
        elif "@" in url:
            raise ValueError("the address may have no user and password; use `tls`")
        return url

    @field_validator("tls")
    @classmethod
    def _leave_tls_to_others(cls, tls: str, info: ValidationInfo) -> str:
        url = info.data.get("url", "")
        if tls and is_cluster(url):
            raise ValueError("the kubeconfig says how a cluster is reached: leave `tls` out")
        if tls and is_ssh(url):
            raise ValueError("SSH protects the connection by itself: leave `tls` out")
        return tls


class SandboxSettings(Limits):
    """The options of a sandbox. Only the recipe sets them: no task can loosen them. The ceilings of
    the worker's host limit them."""

    image: str
    """Image for tasks that name none. It needs `sh` and `sleep`, and `python3` for most tools."""
    images: tuple[str, ...] = ()
    """Further images that tasks may name. A host pulls each when the first task needs it."""
    pull_submitted: bool = False
    """Whether workers also pull the images of tasks that were submitted and have not started. Each
    worker does so for all of them, so it helps if all workers use the same hosts."""
    pull_s: Positive = 900
    """Seconds that one pull of an image may take."""
    images_gb: float | None = Field(default=None, gt=0)
    """If the images of a host take more than this, in GB, those that Headrace pulled and that no
    episode needs are removed, the least recently used first."""
    images_unused_h: float | None = Field(default=None, gt=0)
    """Images that Headrace pulled are removed if no episode used them for these hours."""
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
    root_mb: Positive | None = None
    """If set, the image's files may be changed if their modes allow it to the sandbox's user, up to
    this many MiB on the engine's disk. The engine's storage driver must be able to limit that."""
    hosts: tuple[HostSettings, ...] = ()
    """Engines and clusters that share the episodes, instead of the engine that the command `docker`
    would use. Each is a table with `url`, `slots` and, for TLS, `tls`: the folder of ca.pem,
    cert.pem and key.pem on the worker's host. The `url` is `unix:///path`, `tcp://host:port`,
    `ssh://user@host`, or `kubernetes://CONTEXT/NAMESPACE` for a cluster."""
    ready: int = Field(default=0, ge=0)
    """Containers of `image` that each host has started before episodes need them, beside `slots`.
    They live for `lifetime_s`, so that must exceed the deadlines of tasks by far."""
    keep_processes: bool = False
    """Whether processes go on when their command ends, such as a server that later commands use. If
    they keep a command from beginning, the policy is responsible."""

    @field_validator("hosts")
    @classmethod
    def _name_each_host_once(cls, hosts: tuple[HostSettings, ...]) -> tuple[HostSettings, ...]:
        if len({host.url for host in hosts}) < len(hosts):
            raise ValueError("two of the hosts have the same url")
        return hosts

    @property
    def on_cluster(self) -> bool:
        """Whether an episode may get a pod."""
        return any(is_cluster(host.url) for host in self.hosts)

    @model_validator(mode="after")
    def _leave_to_the_nodes(self) -> SandboxSettings:
        given = [key for key in NOT_IN_PODS if getattr(self, key)]
        if self.on_cluster and given:
            raise ValueError(
                f"{', '.join(given)} can't be had on Kubernetes, where the nodes look after images "
                "and disks: leave it out, or take no kubernetes:// address as a host"
            )
        return self


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
        engine: SandboxEngine,
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
            began = asyncio.get_running_loop().time()
            run_id, output, first = await self._start().begin(stack, command)
            kept.add(first)
            try:
                ended = await self._read(output, kept, limit_s)
                if ended:
                    await self._kill(output)
                else:
                    code = await self._engine.exit_code(run_id)
            except (NotThere, Conflict) as error:
                if asyncio.get_running_loop().time() < began + REMEMBERED_S:
                    await self._start().require_known(error)
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

    async def write_files(self, files: Mapping[str, TaskFile]) -> None:
        """Write the files of a task into /workspace, before anything else runs in it.

        Raises UsageError if they do not fit, and InfrastructureError if they can't be fetched.
        """
        async with self._turn:
            await write_files(self._start(), files, self._settings.disk_mb)

    async def collect(
        self, patterns: Sequence[str], limits: Artifacts
    ) -> tuple[CollectedFiles, list[str]]:
        """Return the plain files of /workspace that match, and what was left out, with reasons.

        Raises SandboxEnded if the policy made them uncopyable.
        """
        async with self._turn:
            return await collect_files(self._start(), patterns, limits, self._settings.disk_mb)

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

    async def _read(self, output: CommandOutput, kept: KeptOutput, limit_s: float) -> str:
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

    async def _kill(self, output: CommandOutput) -> None:
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
