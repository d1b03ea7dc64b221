"""Sandboxes of one environment of the recipe: made, found again, pooled, swept away.

Every container is labelled. One that no open episode needs is removed by the owner of its
partition: its reset lies in the log before what that worker has read, so that it knows. One past
its deadline is removed by any worker of the engine, and ends by itself where none lives.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from schemas.events import EnvironmentUse
from services.clock import now
from services.docker.engine import Conflict, Engine, NotThere
from services.docker.hardened import container
from services.env.docker import names
from services.env.docker.environment import DockerEnvironment
from services.env.docker.sandbox import Sandbox
from services.env.docker.settings import read_settings
from services.env.docker.tools import Tool
from services.env.environment import Claim, Environment
from services.env.instances import Instances
from services.errors import DependencyError, InfrastructureError, UsageError
from services.plugins import load
from services.types import TaskView

logger = logging.getLogger(__name__)

TOOLS = {
    "shell": "services.env.docker.tools:Shell",
    "python": "services.env.docker.tools:Python",
    "calculator": "services.env.docker.calculator:Calculator",
    "coding": "services.env.docker.coding:Coding",
    "repair": "services.env.docker.repair:Repair",
}
LABEL = "headrace."
OVERDUE_S = 60.0
"""Seconds past its deadline after which anybody removes a container: clocks differ."""
LIMITS = ("MemoryLimit", "PidsLimit", "CpuCfsQuota")
"""What an engine must be able to limit. Where it can't it says so only in a warning."""
CLOSE_S = 2.0


class DockerSetup:
    """An environment of the recipe whose episodes have containers. As EnvironmentSetup."""

    def __init__(
        self,
        key: str,
        options: Mapping[str, Any],
        slots: asyncio.Semaphore,
        namespace: str,
        instances: Instances,
        engine: Engine | None = None,
    ) -> None:
        """`key` is the environment's in the recipe. UsageError names each wrong option."""
        self.options = options
        self.slots = slots
        self.settings = read_settings(options)
        self._key = key
        self._namespace = namespace
        self._instances = instances
        self._make_tool: Callable[..., Tool] = load("tool", self.settings.tool, TOOLS)
        self._engine = engine or Engine()
        self._idle: dict[str, str] = {}
        """Names of the idle containers that this worker pooled, and their images."""

    async def open(self) -> None:
        """Checks the engine, and pulls the images. Before it returns no episode is taken.

        DependencyError where the engine is out of reach, UsageError where it is unfit.
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
        """An environment without a container yet. UsageError for an image not in the recipe."""
        image = use.image or self.settings.image
        if image not in (self.settings.image, *self.settings.images):
            raise UsageError(
                f"environments.{self._key}.options: image {image!r} is not among its `images`"
            )
        return DockerEnvironment(self, claim, image, persistent=use.mode == "persistent")

    async def give_back(self, use: EnvironmentUse, environment: Environment, fit: bool) -> None:
        """Pools a persistent sandbox that is fit to be reset; removes any other."""
        assert isinstance(environment, DockerEnvironment)
        try:
            async with asyncio.timeout(CLOSE_S):
                if environment.persistent and fit:
                    await self._pool(environment)
                else:
                    await self.remove(environment)
        except TimeoutError:
            logger.warning("a sandbox was not removed in %s s: it will be swept away", CLOSE_S)
        except InfrastructureError as error:
            logger.warning("a sandbox could not be given back, and will be swept away: %s", error)

    async def close_pool(self) -> None:
        """Removes the idle containers of this worker; what is in use stays to be found."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*map(self._engine.remove, self._idle), return_exceptions=True)
        except TimeoutError:
            logger.warning("idle sandboxes were not removed in %s s", CLOSE_S)
        await self._engine.aclose()

    async def start(self, environment: DockerEnvironment) -> Sandbox:
        """A fresh container for an environment: made, or an idle one restarted."""
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
        """The running container of an attempt, where action `done` was the last one begun.

        InfrastructureError `sandbox_lost` where there is none, and then none is left.
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
        """Removes what the episode has of this attempt and those before; never of a newer one."""
        pattern = names.of_episode(self._namespace, claim.task, claim.sample)
        for found in await self._list(pattern):
            name = names.parse(found["Names"][0])
            if name is not None and name.attempt <= claim.attempt:
                await self._discard(found, "an earlier try")

    async def remove(self, environment: DockerEnvironment) -> None:
        """Removes an environment's container, whether it was started or is being made."""
        sandbox = environment.sandbox
        if sandbox is None:
            await self.clear(environment.claim)
            return
        await self._engine.remove(str(sandbox.name))
        self._instances.enter(sandbox.instance, "sandbox", "gone")

    async def sweep(
        self, partition: int, read_to: int, open_attempt: Callable[[int, int], int | None]
    ) -> None:
        """Removes the containers of a partition that no open episode needs, and any overdue.

        The log is read to offset `read_to`: a container whose reset lies there, and whose attempt
        isn't open, is done for good. One whose reset lies further on is not known yet.
        """
        for found in await self._list(names.of_partition(self._namespace, partition)):
            name = names.parse(found["Names"][0])
            if name is None or name.partition != partition or name.offset > read_to:
                continue
            attempt = open_attempt(name.task, name.sample)
            if attempt is None or name.attempt < attempt:
                await self._discard(found, "without an owner")
        for found in await self._engine.containers({f"{LABEL}deadline": ""}):
            if float(found["Labels"][f"{LABEL}deadline"]) + OVERDUE_S < now():
                await self._discard(found, "past its deadline")

    def tool(self, sandbox: Sandbox, task: TaskView) -> Tool:
        """The tool that works in a sandbox."""
        return self._make_tool(sandbox, task, **self.settings.tool_options)

    async def _reuse(self, environment: DockerEnvironment) -> Sandbox | None:
        """An idle container with time enough: whoever pooled it, who renames it has it."""
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
        if not environment.persistent:  # a persistent one's name alone says who has it now
            labels |= {
                "task": str(claim.task),
                "sample": str(claim.sample),
                "attempt": str(claim.attempt),
            }
        return {f"{LABEL}{label}": text for label, text in labels.items()}

    async def _ready(self, image: str) -> None:
        """Has an image at hand. UsageError where it can't be had, or has volumes."""
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
                f"({', '.join(volumes)}), whose size nothing limits: build it without"
            )


def _require_fit(info: Mapping[str, Any], runtime: str) -> None:
    """UsageError unless the engine can keep what a sandbox promises."""
    runtimes = info.get("Runtimes") or {}
    if runtime and runtime not in runtimes:
        have = ", ".join(sorted(runtimes))
        raise UsageError(f"the Docker engine has no runtime {runtime!r}; it has {have}")
    missing = [limit for limit in LIMITS if not info.get(limit)]
    if missing:
        raise UsageError(f"the Docker engine's kernel can't limit: {', '.join(missing)}")
    security = " ".join(info.get("SecurityOptions") or ())
    if not runtime and not re.search(r"name=seccomp(?!,profile=unconfined)", security):
        raise UsageError("the Docker engine has no seccomp profile: sandboxes need one, or gVisor")
