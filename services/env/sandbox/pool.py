"""The sandboxes of one environment of the recipe, on one host or on several.

Every container has labels. The worker that owns a container's partition removes the container once
no open episode needs it: the worker has read the log beyond the container's reset, so it can tell.
Any worker on the engine removes a container after its deadline. If no worker is left, the container
ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.errors import InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.clock import now
from headrace.services.base.plugins import load
from headrace.services.base.types import TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.container_names import InUse
from headrace.services.env.sandbox.docker_environment import DockerEnvironment
from headrace.services.env.sandbox.hosts.container_source import Whose
from headrace.services.env.sandbox.hosts.sandbox_host import SandboxHost
from headrace.services.env.sandbox.hosts.sandbox_hosts import SandboxHosts
from headrace.services.env.sandbox.sandbox import Sandbox, SandboxSettings
from headrace.services.env.sandbox.tools import Tool
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.processes.docker.ceilings import read_ceilings
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.hardened import read_limits
from headrace.services.tasks.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)

TOOLS = {
    "shell": "headrace.services.env.sandbox.tools:Shell",
    "python": "headrace.services.env.sandbox.tools:Python",
    "coding": "headrace.services.env.sandbox.coding:Coding",
    "repair": "headrace.services.env.sandbox.repair:Repair",
}
CLOSE_S = 2.0
POOL_S = 8.0
"""Seconds that a persistent sandbox has to restart when its episode has ended."""
AHEAD = 128
"""Most episodes that have their image pulled while they wait for a slot, or have a slot."""


class DockerSetup:
    """The Setup of an environment whose episodes have containers."""

    def __init__(
        self,
        key: str,
        options: Mapping[str, Any],
        slots: EnvironmentSlots,
        namespace: str,
        instances: Instances,
        engine: DockerEngine | None = None,
        ahead: int = AHEAD,
        store: ArtifactStore | None = None,
    ) -> None:
        """`key` is the environment's key in the recipe.

        Up to `ahead` episodes have their images pulled before they get a slot. Raises UsageError
        for wrong options, and for options above a ceiling of this host.
        """
        self.options = options
        self.slots = slots
        self.store = store
        self._options = f"environments.{key}.options"
        self.settings = read_limits(SandboxSettings, options, self._options)
        self.expects = self.settings.pull_submitted
        self.ceilings = read_ceilings()
        self.ceilings.require(self.settings, self._options)
        self._instances = instances
        self.make_tool: Callable[[Sandbox, TaskView], Tool] = partial(
            load("tool", self.settings.tool, TOOLS), **self.settings.tool_options
        )
        whose = Whose(namespace, key, self.settings, self.ceilings, instances)
        self.hosts = SandboxHosts(whose, engine)
        self._ahead = asyncio.Semaphore(ahead)
        self._chosen: dict[Claim, SandboxHost] = {}
        """The hosts of the episodes that are prepared."""

    async def open(self) -> None:
        """Check the engine, and pull and pin the recipe's image.

        The worker takes no episode before.

        Raises DependencyError if the engine can't be reached, UsageError if it is not suitable.
        """
        await self.hosts.check()

    @asynccontextmanager
    async def prepared(
        self, use: EnvironmentUse, claim: Claim, resumed: bool
    ) -> AsyncIterator[None]:
        """Hold the image of an episode at a host, as Preparing requires."""
        image = self._image(use)
        async with self._ahead:
            found = await self._host_of(claim) if resumed else None
            host = found or self.hosts.choose(image)
            async with host.holding(image):
                self._chosen[claim] = host
                try:
                    yield
                finally:
                    self._chosen.pop(claim, None)

    def expect(self, use: EnvironmentUse) -> None:
        """Get the image of a task that was submitted, when no episode waits for another."""
        with suppress(UsageError):  # its episodes get the error
            image = self._image(use)
            self.hosts.choose(image).source.expect(image)

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """Return an environment that has no container yet.

        Raises UsageError if the task names an image that the recipe doesn't allow, or if its
        deadline is later than this host allows.
        """
        self.ceilings.lifetime(int(claim.expires_at - now()), self._options)
        if use.mode == "persistent" and self.settings.on_cluster:
            raise UsageError(
                f"{self._options}: a task in mode 'persistent' can't have a pod, because the "
                "folders of a pod stay when it restarts. Submit it as 'ephemeral'; `ready` starts "
                "pods ahead of need"
            )
        if use.mode == "persistent" and self.settings.root_mb:
            raise UsageError(
                f"{self._options}: a task in mode 'persistent' can't have root_mb, because nothing "
                "empties a root file system between two episodes. Submit it as 'ephemeral'"
            )
        image = self._image(use)
        host = self._chosen.get(claim) or self.hosts.choose(image)
        return DockerEnvironment(self, claim, host, image, persistent=use.mode == "persistent")

    def _image(self, use: EnvironmentUse) -> str:
        image = use.image or self.settings.image
        if image not in (self.settings.image, *self.settings.images):
            raise UsageError(
                f"{self._options}: image {image!r} is not among its `images`; "
                f"add it there, or submit the task with another image"
            )
        return image

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Pool a persistent sandbox that may be reset; remove any other."""
        assert isinstance(environment, DockerEnvironment)
        try:
            if environment.persistent and fit and environment.sandbox is not None:
                async with asyncio.timeout(POOL_S):
                    await environment.host.pool(environment.sandbox.name)
            else:
                async with asyncio.timeout(CLOSE_S):
                    await self.remove(environment)
        except TimeoutError:
            logger.warning("a sandbox was not pooled or removed in time; a later sweep removes it")
        except InfrastructureError as error:
            logger.warning("a sandbox was not pooled or removed; a sweep removes it: %s", error)

    async def close_pool(self) -> None:
        """Remove this worker's idle containers. Those in use stay for the next worker."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(host.close_pool() for host in self.hosts.all))
        except TimeoutError:
            logger.warning("idle sandboxes were not removed in %s s; they expire", CLOSE_S)
        await asyncio.gather(*(host.aclose() for host in self.hosts.all))

    async def start(self, environment: DockerEnvironment, *, copy: bool = False) -> Sandbox:
        """Return a fresh container: a new one, a ready one, or an idle one.

        With `copy` it is a new one beside the environment's own.
        """
        host, claim, image = environment.host, environment.claim, environment.image
        name = None
        await host.source.require(image)
        if environment.persistent and not copy:
            name = await host.reuse(claim, image, used=True)
        if name is None and self.settings.ready:
            name = await host.reuse(claim, image, used=False, copy=copy)
        if name is None:
            name = await host.create(claim, image, persistent=environment.persistent, copy=copy)
        return self._sandbox(environment, name)

    def _sandbox(self, environment: DockerEnvironment, name: InUse) -> Sandbox:
        copying = partial(self._copying, environment)
        return Sandbox(environment.host.engine, self.settings, name, copying)

    @asynccontextmanager
    async def _copying(self, environment: DockerEnvironment) -> AsyncIterator[Sandbox]:
        sandbox = await self.start(environment, copy=True)
        try:
            yield sandbox
        finally:
            try:
                await environment.host.remove(sandbox.name)
            except InfrastructureError as error:  # what was graded in it is graded
                logger.warning("a copy of a sandbox was not removed; a sweep removes it: %s", error)

    async def find(self, environment: DockerEnvironment, done: int) -> Sandbox:
        """Return the running container of an attempt whose last begun action is `done`.

        If there is none, raise InfrastructureError `sandbox_lost`. What is left of the attempt
        stays: perhaps `done` is not the last action that was answered.
        """
        claim, why = environment.claim, f"its container is gone{self.hosts.silent()}"
        own = [
            (host, name, found)
            for host, name, found in await self.hosts.of_episode(claim)
            if name.is_of(claim) and not name.copy and found["State"] != "created"
        ]
        if len(own) > 1:  # A worker made one after it had lost the partition.
            raise InfrastructureError("sandbox_lost", "it has two containers")
        for host, name, found in own:
            if found["State"] == "running" and name.begun == done:
                self._instances.enter(name.instance, "sandbox", "busy", "found again")
                environment.host = host
                return self._sandbox(environment, name)
            why = f"its container is {found['State']}, action {name.begun} begun, {done} answered"
        raise InfrastructureError("sandbox_lost", why)

    async def clear(self, claim: Claim) -> None:
        """Remove the containers of this claim and of earlier attempts, never of a later one.

        An attempt may have a second environment, whose actions are in another partition. If nobody
        began this reset before, only a later owner of the partition can have a container of it:
        this worker was frozen. Raises InfrastructureError then, and leaves the container alone.
        """
        for host, name, found in await self.hosts.of_episode(claim):
            if name.is_of(claim) and not claim.repeated:
                message = "another worker has taken its partition over, and made its container"
                raise InfrastructureError("sandbox_lost", message)
            if name.is_of(claim) or name.attempt < claim.attempt:
                await host.discard(found, "left by an earlier attempt")

    async def remove(self, environment: DockerEnvironment) -> None:
        """Remove an environment's container, even if it was still being made."""
        if environment.sandbox is None:
            await self.clear(replace(environment.claim, repeated=True))
            return
        await environment.host.remove(environment.sandbox.name)

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Remove a partition's containers that no open episode needs, and all overdue ones.

        The worker has read the log up to offset `read_to`. If a container's reset is at or before
        it and its attempt isn't open, the container is no longer needed. Containers whose reset is
        after it belong to episodes that the worker has not read yet.
        """
        await self.hosts.sweep(partition, read_to, open_attempt)

    async def _host_of(self, claim: Claim) -> SandboxHost | None:
        """Return the host that has a container of this attempt."""
        for host, name, _ in await self.hosts.of_episode(claim):
            if name.is_of(claim) and not name.copy:
                return host
        return None
