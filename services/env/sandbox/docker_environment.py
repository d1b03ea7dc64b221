"""An environment in a container: a sandbox, the tool that works in it, and the task's files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from headrace.errors import InfrastructureError, UsageError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.answers import LEFT_OUT, MOST_LEFT_OUT
from headrace.services.env.environment import Claim
from headrace.services.env.sandbox.command_start import SandboxEnded
from headrace.services.env.sandbox.hosts.sandbox_host import SandboxHost
from headrace.services.env.sandbox.sandbox import Sandbox, SandboxSettings
from headrace.services.env.sandbox.tools import Tool
from headrace.services.processes.docker.writable_root import WRITABLE
from headrace.services.tasks.artifact_store import ArtifactStore


class SandboxPool(Protocol):
    """What makes, finds and removes the sandboxes of environments."""

    settings: SandboxSettings
    store: ArtifactStore | None
    make_tool: Callable[[Sandbox, TaskView], Tool]

    async def start(self, environment: DockerEnvironment) -> Sandbox:
        """Return a fresh container."""

    async def find(self, environment: DockerEnvironment, done: int) -> Sandbox:
        """Return the running container of an attempt whose last begun action is `done`."""

    async def clear(self, claim: Claim) -> None:
        """Remove the containers of this attempt and of earlier ones."""

    async def remove(self, environment: DockerEnvironment) -> None:
        """Remove an environment's container."""


class DockerEnvironment:
    """One attempt's sandbox and the tool that works in it. It is resumed, never repeated.

    The task's files are in /workspace before the tool begins. What it collects is in there, too.
    """

    replayable = False
    takes_files = True

    def __init__(
        self, pool: SandboxPool, claim: Claim, host: SandboxHost, image: str, *, persistent: bool
    ) -> None:
        self.claim = claim
        self.host = host
        self.image = image
        self.persistent = persistent
        self.sandbox: Sandbox | None = None
        """None until the reset."""
        self._pool = pool
        self._tool: Tool | None = None

    async def reset(self, task: TaskView) -> Observation:
        """Start a fresh sandbox. Remove one that an earlier attempt left.

        The observation's data has the `image_digest` of the sandbox, for readers of the log.
        """
        await self._pool.clear(self.claim)
        self.sandbox = await self._pool.start(self)
        if self._pool.settings.root_mb:
            await self._require_own_programs(self.sandbox)
        if task.artifacts:
            await self.sandbox.write_files(task.artifacts)
        self._tool = self._pool.make_tool(self.sandbox, task)
        first = await self._guarded(self._tool.prepare())
        digest = self.host.source.image(self.image).digest
        return replace(first, data={**first.data, "image_digest": digest})

    async def _require_own_programs(self, sandbox: Sandbox) -> None:
        """Raise UsageError if the policy could replace what the worker runs in the sandbox."""
        if open_to_all := (await sandbox.run(("sh", "-c", WRITABLE))).output.split():
            raise UsageError(
                f"image {self.image!r} lets every user write to {', '.join(open_to_all)}. With "
                "root_mb a policy could replace programs there: build it without that"
            )

    async def resume(self, task: TaskView, done: int) -> None:
        """Find the sandbox that another worker left, as Resumable requires."""
        self.sandbox = await self._pool.find(self, done)
        self._tool = self._pool.make_tool(self.sandbox, task)

    async def step(self, action: str) -> Observation:
        """Claim the action at the engine, then run it."""
        if self.sandbox is None or self._tool is None:
            raise InfrastructureError("sandbox_lost", "a step came before the reset")
        await self.sandbox.begin()
        return await self._guarded(self._tool.act(action, self.sandbox.name.begun))

    async def collect(self, patterns: Sequence[str]) -> Observation:
        """Return the files of /workspace that match, within the limits of the recipe.

        A file that exceeds a limit, and what is no plain file, is left out: the policy made it. No
        action is claimed at the engine, so another worker may collect again.
        """
        if self.sandbox is None or self._pool.store is None:
            raise InfrastructureError("sandbox_lost", "a collect came before the reset")
        try:
            files, left_out = await self.sandbox.collect(patterns, self._pool.store.limits)
        except SandboxEnded as error:
            return Observation(text=f"[{error}]", data={LEFT_OUT: [f"all: {error}"]})
        data = {LEFT_OUT: left_out[:MOST_LEFT_OUT]} if left_out else {}
        return Observation(text=f"{len(files)} files", data=data, artifacts=files)

    async def release(self) -> None:
        """Do nothing: the container keeps running for the next worker."""

    async def aclose(self) -> None:
        """Remove the container."""
        await self._pool.remove(self)

    async def _guarded(self, observing: Awaitable[Observation]) -> Observation:
        """If the policy took its own sandbox down, the episode ends: that is not a failure."""
        try:
            return await observing
        except SandboxEnded as error:
            return Observation(text=f"[{error}]", data={"ended": str(error)}, truncated=True)
