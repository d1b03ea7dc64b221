"""The environment of an episode that has a sandbox, and the interface of the pool it uses."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from headrace.errors import InfrastructureError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim
from headrace.services.env.sandbox.sandbox import Sandbox, SandboxEnded
from headrace.services.env.sandbox.tools import Tool


class Sandboxes(Protocol):
    """Makes, finds and removes the sandboxes of one environment of the recipe."""

    async def start(self, environment: DockerEnvironment) -> Sandbox:
        """Return a fresh sandbox."""

    async def find(self, claim: Claim, done: int) -> Sandbox:
        """Return the attempt's sandbox. InfrastructureError if `done` isn't its last action."""

    async def clear(self, claim: Claim) -> None:
        """Remove what this attempt and earlier ones left."""

    async def remove(self, environment: DockerEnvironment) -> None:
        """Remove the environment's sandbox."""

    def tool(self, sandbox: Sandbox, task: TaskView) -> Tool:
        """Make the tool that works in a sandbox."""


class DockerEnvironment:
    """One attempt's sandbox and the tool that works in it. It is resumed, never repeated."""

    replayable = False

    def __init__(self, pool: Sandboxes, claim: Claim, image: str, *, persistent: bool) -> None:
        self.claim = claim
        self.image = image
        self.persistent = persistent
        self.sandbox: Sandbox | None = None
        """None until the reset."""
        self._pool = pool
        self._tool: Tool | None = None

    async def reset(self, task: TaskView) -> Observation:
        """Start a fresh sandbox. Remove one that an earlier attempt left."""
        await self._pool.clear(self.claim)
        self.sandbox = await self._pool.start(self)
        self._tool = self._pool.tool(self.sandbox, task)
        return await self._guarded(self._tool.prepare())

    async def resume(self, task: TaskView, done: int) -> None:
        """Find the sandbox that another worker left, as Resumable requires."""
        self.sandbox = await self._pool.find(self.claim, done)
        self._tool = self._pool.tool(self.sandbox, task)

    async def step(self, action: str) -> Observation:
        """Claim the action at the engine, then run it."""
        if self.sandbox is None or self._tool is None:
            raise InfrastructureError("sandbox_lost", "a step came before the reset")
        await self.sandbox.begin()
        return await self._guarded(self._tool.act(action, self.sandbox.name.begun))

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
