"""An episode's sandbox as an environment: made at reset, or found again by its name."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING

from headrace.errors import InfrastructureError
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim
from headrace.services.env.sandbox.sandbox import Sandbox, SandboxEnded
from headrace.services.env.sandbox.tools import Tool

if TYPE_CHECKING:
    from headrace.services.env.sandbox.pool import DockerSetup


class DockerEnvironment:
    """One attempt's sandbox and the tool that works in it. Never made again by re-stepping."""

    replayable = False

    def __init__(self, pool: DockerSetup, claim: Claim, image: str, *, persistent: bool) -> None:
        self.claim = claim
        self.image = image
        self.persistent = persistent
        self.sandbox: Sandbox | None = None
        """None until the reset."""
        self._pool = pool
        self._tool: Tool | None = None

    async def reset(self, task: TaskView) -> Observation:
        """A fresh sandbox; one that an earlier try left goes."""
        await self._pool.clear(self.claim)
        self.sandbox = await self._pool.start(self)
        self._tool = self._pool.tool(self.sandbox, task)
        return await self._guarded(self._tool.prepare())

    async def resume(self, task: TaskView, done: int) -> None:
        """As Lasting has it."""
        self.sandbox = await self._pool.find(self.claim, done)
        self._tool = self._pool.tool(self.sandbox, task)

    async def step(self, action: str) -> Observation:
        """Claims the action at the engine, then runs it."""
        if self.sandbox is None or self._tool is None:
            raise InfrastructureError("sandbox_lost", "it was never reset")
        await self.sandbox.begin()
        return await self._guarded(self._tool.act(action, self.sandbox.name.begun))

    async def release(self) -> None:
        """The container stays as it is."""

    async def aclose(self) -> None:
        """Removes the container."""
        await self._pool.remove(self)

    async def _guarded(self, observing: Awaitable[Observation]) -> Observation:
        """What took its own sandbox down ends the episode, and is no failure."""
        try:
            return await observing
        except SandboxEnded as error:
            return Observation(text=f"[{error}]", data={"ended": str(error)}, truncated=True)
