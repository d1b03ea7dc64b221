"""Make, find, pool and remove the sandboxes of one environment of the recipe.

Every container has labels. The worker that owns a container's partition removes the container once
no open episode needs it: the worker has read the log beyond the container's reset, so it can tell.
Any worker on the engine removes a container after its deadline. If no worker is left, the container
ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.clock import now
from headrace.services.base.plugins import Loader, load
from headrace.services.base.types import TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox import container_names as names
from headrace.services.env.sandbox.sandbox import Sandbox
from headrace.services.env.sandbox.sandbox_environment import DockerEnvironment
from headrace.services.env.sandbox.sandbox_settings import read_settings
from headrace.services.env.sandbox.tools import Tool
from headrace.services.processes.docker.docker_engine import Conflict, DockerEngine, NotThere
from headrace.services.processes.docker.hardened import container

logger = logging.getLogger(__name__)


def _shell() -> Any:
    from headrace.services.env.sandbox.tools import Shell

    return Shell


def _python() -> Any:
    from headrace.services.env.sandbox.tools import Python

    return Python


def _coding() -> Any:
    from headrace.services.env.sandbox.coding import Coding

    return Coding


def _repair() -> Any:
    from headrace.services.env.sandbox.repair import Repair

    return Repair


TOOLS: dict[str, Loader] = {
    "shell": _shell,
    "python": _python,
    "coding": _coding,
    "repair": _repair,
}
LABEL = "headrace."
OVERDUE_S = 60.0
"""Seconds after its deadline when any worker removes a container; clocks differ."""
LIMITS = ("MemoryLimit", "PidsLimit", "CpuCfsQuota")
"""Limits that an engine must support. If it doesn't, its own API only gives a warning."""
CLOSE_S = 2.0


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
        """`key` is the environment's key in the recipe. Raises UsageError for wrong options."""
        self.options = options
        self.slots = slots
        self.settings = read_settings(options)
        self._key = key
        self._namespace = namespace
        self._instances = instances
        self._make_tool: Callable[..., Tool] = load("tool", self.settings.tool, TOOLS)
        self._engine = engine or DockerEngine()
        self._idle: dict[str, str] = {}
        """Images of the idle containers that this worker pooled, by container name."""

    async def open(self) -> None:
        """Check the engine and pull the images. The worker takes no episode before.

        Raises DependencyError if the engine can't be reached, UsageError if it is not suitable.
        """
        try:
            _require_fit(await self._engine.info(), self.settings.runtime)
            for image in {self.settings.image, *self.settings.images}:
                await self._ready(image)
        except InfrastructureError as error:
            raise DependencyError(
                f"environments.{self._key}: the Docker engine at {self._engine.host} can't be "
                f"used ({error}). Start it, and let this user open its socket; or name another one "
                "by DOCKER_HOST or `docker context use`"
            ) from error

    async def take(self, use: EnvironmentUse, claim: Claim) -> Environment:
        """Return an environment that has no container yet.

        Raises UsageError if the task names an image that the recipe doesn't allow.
        """
        image = use.image or self.settings.image
        if image not in (self.settings.image, *self.settings.images):
            raise UsageError(
                f"environments.{self._key}.options: image {image!r} is not among its `images`; "
                f"add it there, or submit the task with another image"
            )
        return DockerEnvironment(self, claim, image, persistent=use.mode == "persistent")

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Pool a persistent sandbox that may be reset; remove any other."""
        assert isinstance(environment, DockerEnvironment)
        try:
            async with asyncio.timeout(CLOSE_S):
                if environment.persistent and fit:
                    await self._pool(environment)
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

    async def start(self, environment: DockerEnvironment) -> Sandbox:
        """Return a fresh container: a new one, or an idle one that was restarted."""
        if environment.persistent and (found := await self._reuse(environment)):
            return found
        claim, token = environment.claim, uuid.uuid4().hex[:12]
        instance = f"sandbox-{token}"
        live_s = max(1, int(claim.expires_at - now()) + 1)
        if environment.persistent:
            live_s = max(live_s, self.settings.lifetime_s)
        self._instances.enter(instance, "sandbox", "provisioning")
        name = names.in_use(self._namespace, claim, token)
        labels = self._labels(environment, instance, now() + live_s)
        try:
            await self._engine.create(
                str(name),
                container(self.settings, environment.image, labels, live_s, self.settings.network),
            )
        except InfrastructureError as error:
            self._instances.enter(instance, "sandbox", "failed", str(error))
            raise
        self._instances.enter(instance, "sandbox", "ready")
        self._instances.enter(instance, "sandbox", "busy")
        return Sandbox(self._engine, self.settings, name, instance)

    async def find(self, claim: Claim, done: int) -> Sandbox:
        """Return the running container of an attempt whose last begun action is `done`.

        If there is none, remove what is left of the attempt and raise InfrastructureError
        `sandbox_lost`.
        """
        pattern = names.of_episode(self._namespace, claim.task, claim.sample)
        why = "its container is gone"
        for found in await self._list(pattern):
            name = names.parse(found["Names"][0])
            if name is None or name.attempt != claim.attempt:
                continue
            if found["State"] == "running" and name.begun == done:
                instance = found["Labels"][f"{LABEL}instance"]
                self._instances.enter(instance, "sandbox", "busy", "found again")
                return Sandbox(self._engine, self.settings, name, instance)
            why = f"its container is {found['State']}, action {name.begun} begun, {done} answered"
        await self.clear(claim)
        raise InfrastructureError("sandbox_lost", why)

    async def clear(self, claim: Claim) -> None:
        """Remove the containers of this attempt and of earlier ones, never of a later one."""
        pattern = names.of_episode(self._namespace, claim.task, claim.sample)
        for found in await self._list(pattern):
            name = names.parse(found["Names"][0])
            if name is not None and name.attempt <= claim.attempt:
                await self._discard(found, "left by an earlier attempt")

    async def remove(self, environment: DockerEnvironment) -> None:
        """Remove an environment's container, even if it was still being made."""
        sandbox = environment.sandbox
        if sandbox is None:
            await self.clear(environment.claim)
            return
        await self._engine.remove(str(sandbox.name))
        self._instances.enter(sandbox.instance, "sandbox", "gone")

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Remove a partition's containers that no open episode needs, and all overdue ones.

        The worker has read the log up to offset `read_to`. If a container's reset is at or before
        it and its attempt isn't open, the container is no longer needed. Containers whose reset is
        after it belong to episodes that the worker has not read yet.
        """
        for found in await self._list(names.of_partition(self._namespace, partition)):
            name = names.parse(found["Names"][0])
            if name is None or name.partition != partition or name.offset > read_to:
                continue
            attempt = open_attempt(name.task, name.sample)
            if attempt is None or name.attempt < attempt:
                await self._discard(found, "that no open episode needs")
        for found in await self._engine.containers({f"{LABEL}deadline": ""}):
            if float(found["Labels"][f"{LABEL}deadline"]) + OVERDUE_S < now():
                await self._discard(found, "past its deadline")

    def tool(self, sandbox: Sandbox, task: TaskView) -> Tool:
        """Make the tool that works in a sandbox."""
        return self._make_tool(sandbox, task, **self.settings.tool_options)

    async def _reuse(self, environment: DockerEnvironment) -> Sandbox | None:
        """Take an idle container that lives long enough, whichever worker pooled it.

        The worker that renames it first has it.
        """
        for found in await self._list(names.of_idle(self._namespace)):
            labels, idle = found["Labels"], found["Names"][0].lstrip("/")
            late = float(labels[f"{LABEL}deadline"]) < environment.claim.expires_at
            if found["State"] != "running" or late or found["Image"] != environment.image:
                continue
            token = idle.rpartition(".")[2]
            taken = names.taken(self._namespace, token)
            name = names.in_use(self._namespace, environment.claim, token)
            try:
                await self._engine.rename(idle, taken)
                self._idle.pop(idle, None)
                await self._engine.rename(taken, str(name))
                await self._engine.restart(str(name))
            except (NotThere, Conflict):
                continue
            instance = labels[f"{LABEL}instance"]
            self._instances.enter(instance, "sandbox", "busy")
            return Sandbox(self._engine, self.settings, name, instance)
        return None

    async def _pool(self, environment: DockerEnvironment) -> None:
        sandbox = environment.sandbox
        if sandbox is not None:
            idle = names.idle(self._namespace, sandbox.name.token)
            await self._engine.rename(str(sandbox.name), idle)
            self._idle[idle] = environment.image
            self._instances.enter(sandbox.instance, "sandbox", "ready")

    async def _list(self, pattern: str) -> list[Mapping[str, Any]]:
        labels = {f"{LABEL}namespace": self._namespace, f"{LABEL}environment": self._key}
        return await self._engine.containers(labels, pattern)

    async def _discard(self, found: Mapping[str, Any], why: str) -> None:
        logger.info("removing a sandbox %s: %s", why, found["Names"][0])
        await self._engine.remove(found["Names"][0].lstrip("/"))
        instance = found["Labels"].get(f"{LABEL}instance", found["Id"][:12])
        self._instances.enter(instance, "sandbox", "gone", why)

    def _labels(
        self, environment: DockerEnvironment, instance: str, deadline: float
    ) -> dict[str, str]:
        claim = environment.claim
        labels = {
            "namespace": self._namespace,
            "environment": self._key,
            "instance": instance,
            "deadline": f"{deadline:.0f}",
        }
        # Labels can't change, so only the name says which attempt uses a persistent container.
        if not environment.persistent:
            labels |= {
                "task": str(claim.task),
                "sample": str(claim.sample),
                "attempt": str(claim.attempt),
            }
        return {f"{LABEL}{label}": text for label, text in labels.items()}

    async def _ready(self, image: str) -> None:
        """Pull an image if it is missing. UsageError if that fails, or if it has volumes."""
        try:
            found = await self._engine.image(image)
        except NotThere:
            logger.info("pulling %s", image)
            try:
                await self._engine.pull(image)
                found = await self._engine.image(image)
            except InfrastructureError as error:
                raise UsageError(
                    f"environments.{self._key}.options: the engine has no image {image!r} and "
                    f"can't pull it: {error.message}. Build, load or pull it first"
                ) from error
        if volumes := (found.get("Config") or {}).get("Volumes"):
            raise UsageError(
                f"environments.{self._key}.options: image {image!r} declares volumes "
                f"({', '.join(volumes)}), whose size nothing limits. Build it without volumes"
            )


def _require_fit(info: Mapping[str, Any], runtime: str) -> None:
    """Raise UsageError unless the engine can enforce the limits of a sandbox."""
    runtimes = info.get("Runtimes") or {}
    if runtime and runtime not in runtimes:
        have = ", ".join(sorted(runtimes))
        raise UsageError(f"the Docker engine has no runtime {runtime!r}; it has {have}")
    missing = [limit for limit in LIMITS if not info.get(limit)]
    if missing:
        raise UsageError(f"the Docker engine's kernel can't enforce: {', '.join(missing)}")
    security = " ".join(info.get("SecurityOptions") or ())
    if not runtime and not re.search(r"name=seccomp(?!,profile=unconfined)", security):
        raise UsageError("the Docker engine has no seccomp profile: set one, or runtime = 'runsc'")
