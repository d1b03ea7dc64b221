"""Make, find, pool and remove the sandboxes of one environment of the recipe.

Every container has labels. The worker that owns a container's partition removes the container once
no open episode needs it: the worker has read the log beyond the container's reset, so it can tell.
Any worker on the engine removes a container after its deadline. If no worker is left, the container
ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.clock import now
from headrace.services.base.plugins import load
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox import container_names as names
from headrace.services.env.sandbox.command_start import SandboxEnded
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.env.sandbox.sandbox import Sandbox, SandboxSettings
from headrace.services.env.sandbox.tools import Tool
from headrace.services.processes.docker.ceilings import read_ceilings
from headrace.services.processes.docker.docker_engine import Conflict, DockerEngine, NotThere
from headrace.services.processes.docker.engine_checks import require_engine
from headrace.services.processes.docker.hardened import container, read_limits
from headrace.services.processes.docker.pinned_images import PinnedImages

logger = logging.getLogger(__name__)

TOOLS = {
    "shell": "headrace.services.env.sandbox.tools:Shell",
    "python": "headrace.services.env.sandbox.tools:Python",
    "coding": "headrace.services.env.sandbox.coding:Coding",
    "repair": "headrace.services.env.sandbox.repair:Repair",
}
LABEL = "headrace."
OVERDUE_S = 60.0
"""Seconds after its deadline when any worker removes a container; clocks differ."""
CLOSE_S = 2.0


class DockerEnvironment:
    """One attempt's sandbox and the tool that works in it. It is resumed, never repeated."""

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
        """Start a fresh sandbox. Remove one that an earlier attempt left.

        The observation's data has the `image_digest` of the sandbox, for readers of the log.
        """
        await self._pool.clear(self.claim)
        self.sandbox = await self._pool.start(self)
        self._tool = self._pool.make_tool(self.sandbox, task)
        first = await self._guarded(self._tool.prepare())
        return replace(first, data={**first.data, "image_digest": self._pool.digest(self.image)})

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


class DockerSetup:
    """The Setup of an environment whose episodes have containers."""

    def __init__(
        self,
        key: str,
        options: Mapping[str, Any],
        slots: asyncio.Semaphore,
        namespace: str,
        instances: Instances,
        engine: DockerEngine | None = None,
    ) -> None:
        """`key` is the environment's key in the recipe.

        Raises UsageError for wrong options, and for options above a ceiling of this host.
        """
        self.options = options
        self.slots = slots
        self._whose = f"environments.{key}.options"
        self.settings = read_limits(SandboxSettings, options, self._whose)
        self.ceilings = read_ceilings()
        self.ceilings.require(self.settings, self._whose)
        self._images = PinnedImages(self._whose, self.ceilings)
        self._key = key
        self._namespace = namespace
        self._instances = instances
        self.make_tool: Callable[[Sandbox, TaskView], Tool] = partial(
            load("tool", self.settings.tool, TOOLS), **self.settings.tool_options
        )
        self._engine = engine or DockerEngine()
        self._idle: set[str] = set()
        """Names of the idle containers that this worker pooled."""

    async def open(self) -> None:
        """Check the engine, and pull and pin the images. The worker takes no episode before.

        Raises DependencyError if the engine can't be reached, UsageError if it is not suitable.
        """
        try:
            info, runtime = await self._engine.info(), self.settings.runtime
            isolation = require_engine(info, runtime, self.ceilings, self._whose)
            logger.info("%s: containers have %s", self._whose, isolation)
            for image in {self.settings.image, *self.settings.images}:
                await self._images.pin(self._engine, image)
        except InfrastructureError as error:
            raise DependencyError(
                f"environments.{self._key}: the Docker engine at {self._engine.host} can't be "
                f"used ({error}). Start it, and let this user open its socket; or name another one "
                "by DOCKER_HOST or `docker context use`"
            ) from error

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """Return an environment that has no container yet.

        Raises UsageError if the task names an image that the recipe doesn't allow, or if its
        deadline is later than this host allows.
        """
        self.ceilings.lifetime(int(claim.expires_at - now()), self._whose)
        image = use.image or self.settings.image
        if image not in (self.settings.image, *self.settings.images):
            raise UsageError(
                f"{self._whose}: image {image!r} is not among its `images`; "
                f"add it there, or submit the task with another image"
            )
        return DockerEnvironment(self, claim, image, persistent=use.mode == "persistent")

    def digest(self, image: str) -> str:
        """Return the digest to which an image of the recipe is pinned."""
        return self._images[image].digest

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Pool a persistent sandbox that may be reset; remove any other."""
        assert isinstance(environment, DockerEnvironment)
        try:
            async with asyncio.timeout(CLOSE_S):
                if environment.persistent and fit and environment.sandbox is not None:
                    name = environment.sandbox.name
                    idle = names.idle(self._namespace, name.token)
                    await self._engine.rename(str(name), idle)
                    self._idle.add(idle)
                    self._instances.enter(name.instance, "sandbox", "ready")
                else:
                    await self.remove(environment)
        except TimeoutError:
            logger.warning("a sandbox was not removed in %s s; a later sweep removes it", CLOSE_S)
        except InfrastructureError as error:
            logger.warning("a sandbox was not pooled or removed; a sweep removes it: %s", error)

    async def close_pool(self) -> None:
        """Remove this worker's idle containers. Those in use stay for the next worker."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(self._engine.remove, self._idle), return_exceptions=True)
        except TimeoutError:
            logger.warning("idle sandboxes were not removed in %s s; they expire", CLOSE_S)
        await self._engine.aclose()

    async def start(self, environment: DockerEnvironment, *, copy: bool = False) -> Sandbox:
        """Return a fresh container: a new one, or an idle one that was restarted.

        With `copy` it is a new one beside the environment's own.
        """
        if environment.persistent and not copy and (found := await self._reuse(environment)):
            return found
        claim = environment.claim
        name = names.in_use(self._namespace, claim, uuid.uuid4().hex[:12], copy=copy)
        live_s = max(1, int(claim.expires_at - now()) + 1)
        if environment.persistent:
            live_s = max(live_s, self.settings.lifetime_s)
        live_s = self.ceilings.lifetime(live_s, self._whose)
        image = self._images[environment.image]
        self._instances.enter(name.instance, "sandbox", "provisioning", f"of image {image}")
        labels = {
            "namespace": self._namespace,
            "environment": self._key,
            "instance": name.instance,
            "deadline": f"{now() + live_s:.0f}",
        }
        # Labels can't change, so only the name says which attempt uses a persistent container.
        if not environment.persistent:
            labels |= {
                "task": str(claim.task),
                "sample": str(claim.sample),
                "attempt": str(claim.attempt),
            }
        labels = {f"{LABEL}{label}": text for label, text in labels.items()} | image.labels
        body = container(self.settings, image.digest, labels, live_s, self.settings.network)
        try:
            await self._images.create(self._engine, str(name), body)
        except InfrastructureError as error:
            self._instances.enter(name.instance, "sandbox", "failed", str(error))
            raise
        self._instances.enter(name.instance, "sandbox", "ready")
        self._instances.enter(name.instance, "sandbox", "busy")
        return self._sandbox(environment, name)

    def _sandbox(self, environment: DockerEnvironment, name: InUse) -> Sandbox:
        copying = partial(self._copying, environment)
        return Sandbox(self._engine, self.settings, name, copying)

    @asynccontextmanager
    async def _copying(self, environment: DockerEnvironment) -> AsyncIterator[Sandbox]:
        sandbox = await self.start(environment, copy=True)
        try:
            yield sandbox
        finally:
            try:
                await self._engine.remove(str(sandbox.name))
                self._instances.enter(sandbox.name.instance, "sandbox", "gone")
            except InfrastructureError as error:  # what was graded in it is graded
                logger.warning("a copy of a sandbox was not removed; a sweep removes it: %s", error)

    async def find(self, environment: DockerEnvironment, done: int) -> Sandbox:
        """Return the running container of an attempt whose last begun action is `done`.

        If there is none, remove what is left of the attempt and raise InfrastructureError
        `sandbox_lost`.
        """
        claim, why = environment.claim, "its container is gone"
        for name, found in await self._in_use(names.of_episode(self._namespace, claim)):
            if name.attempt != claim.attempt or name.copy:
                continue
            if found["State"] == "running" and name.begun == done:
                self._instances.enter(name.instance, "sandbox", "busy", "found again")
                return self._sandbox(environment, name)
            why = f"its container is {found['State']}, action {name.begun} begun, {done} answered"
        await self.clear(claim)
        raise InfrastructureError("sandbox_lost", why)

    async def clear(self, claim: Claim) -> None:
        """Remove the containers of this attempt and of earlier ones, never of a later one."""
        for name, found in await self._in_use(names.of_episode(self._namespace, claim)):
            if name.attempt <= claim.attempt:
                await self._discard(found, "left by an earlier attempt")

    async def remove(self, environment: DockerEnvironment) -> None:
        """Remove an environment's container, even if it was still being made."""
        sandbox = environment.sandbox
        if sandbox is None:
            await self.clear(environment.claim)
            return
        await self._engine.remove(str(sandbox.name))
        self._instances.enter(sandbox.name.instance, "sandbox", "gone")

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Remove a partition's containers that no open episode needs, and all overdue ones.

        The worker has read the log up to offset `read_to`. If a container's reset is at or before
        it and its attempt isn't open, the container is no longer needed. Containers whose reset is
        after it belong to episodes that the worker has not read yet.
        """
        for name, found in await self._in_use(names.of_partition(self._namespace, partition)):
            if name.partition != partition or name.offset > read_to:
                continue
            attempt = open_attempt(name.task, name.sample)
            if attempt is None or name.attempt < attempt:
                await self._discard(found, "that no open episode needs")
        for found in await self._engine.containers({f"{LABEL}deadline": ""}):
            if float(found["Labels"][f"{LABEL}deadline"]) + OVERDUE_S < now():
                await self._discard(found, "past its deadline")

    async def _reuse(self, environment: DockerEnvironment) -> Sandbox | None:
        """Take an idle container that lives long enough, whichever worker pooled it.

        The worker that renames it first has it.
        """
        image = self._images[environment.image]
        for found in await self._list(names.of_idle(self._namespace)):
            idle, labels = found["Names"][0].lstrip("/"), found["Labels"]
            late = float(labels[f"{LABEL}deadline"]) < environment.claim.expires_at
            alike = {**labels, **image.labels} == labels
            if found["State"] != "running" or late or not alike:
                continue
            token = idle.rpartition(".")[2]
            taken = names.taken(self._namespace, token)
            name = names.in_use(self._namespace, environment.claim, token)
            try:
                await self._engine.rename(idle, taken)
                self._idle.discard(idle)
                await self._engine.rename(taken, str(name))
                await self._engine.restart(str(name))
            except (NotThere, Conflict):
                continue
            self._instances.enter(name.instance, "sandbox", "busy")
            return self._sandbox(environment, name)
        return None

    async def _in_use(self, pattern: str) -> list[tuple[InUse, Mapping[str, Any]]]:
        """Return the containers in use whose names match a pattern."""
        found = await self._list(pattern)
        return [(name, each) for each in found if (name := names.parse(each["Names"][0]))]

    async def _list(self, pattern: str) -> list[Mapping[str, Any]]:
        labels = {f"{LABEL}namespace": self._namespace, f"{LABEL}environment": self._key}
        return await self._engine.containers(labels, pattern)

    async def _discard(self, found: Mapping[str, Any], why: str) -> None:
        logger.info("removing a sandbox %s: %s", why, found["Names"][0])
        await self._engine.remove(found["Names"][0].lstrip("/"))
        instance = found["Labels"].get(f"{LABEL}instance", found["Id"][:12])
        self._instances.enter(instance, "sandbox", "gone", why)
