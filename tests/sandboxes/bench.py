"""Sandboxes without a log: a setup on a real engine, and the states that it reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

from headrace.schemas.events import EnvironmentUse, Event, InstanceStateEntered
from headrace.services.base.types import TaskView
from headrace.services.env.environment import Claim
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.container_names import Which
from headrace.services.env.sandbox.docker_environment import DockerEnvironment
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.kubernetes.cluster_address import is_cluster
from tests.sandboxes.docker_engine import IMAGE

NAMESPACE = "test-sandboxes"
OPTIONS: Mapping[str, Any] = {
    "image": IMAGE, "memory_mb": 64, "pids": 32, "disk_mb": 16, "command_s": 10,
}  # fmt: skip


def claim(task: int = 1, *, attempt: int = 0, offset: int = 0, seconds: float = 300) -> Claim:
    return Claim(task, 0, attempt, partition=0, offset=offset, expires_at=time.time() + seconds)


def view(payload: Mapping[str, Any] | None = None) -> TaskView:
    return TaskView(1, 0, payload or {}, {}, 0)


class Bench:
    """One worker's setup."""

    def __init__(self, host: str, options: Mapping[str, Any]) -> None:
        self.states: list[tuple[str, str]] = []
        if is_cluster(host):
            # A pod's node must have what it may use: CPUs for six.
            options = {"image": f"localhost/{IMAGE}:latest", "cpus": 0.3, **options}
            options["hosts"] = [{"url": host, "slots": 8}]
        self._instances = Instances(self._send, "worker")
        self.setup = DockerSetup(
            "default", {**OPTIONS, **options}, EnvironmentSlots(8), NAMESPACE,
            self._instances, None if is_cluster(host) else DockerEngine(host),
        )  # fmt: skip
        hosts = self.setup.hosts.all
        self.source = next((one for one in hosts if str(one) == host), hosts[0]).source
        self.engine = self.source.engine

    async def _send(self, event: Event) -> None:
        assert isinstance(event, InstanceStateEntered)
        if event.kind == "sandbox":
            self.states.append((event.instance, event.state))

    async def take(
        self, owner: Claim | None = None, mode: Literal["ephemeral", "persistent"] = "ephemeral"
    ) -> DockerEnvironment:
        use = EnvironmentUse(use="default", mode=mode)
        environment = await self.setup.take(use, owner or claim())
        assert isinstance(environment, DockerEnvironment)
        return environment

    async def fresh(self, owner: Claim | None = None, **payload: Any) -> DockerEnvironment:
        environment = await self.take(owner)
        await environment.reset(view(payload))
        return environment

    async def left(self) -> list[str]:
        """Names of the containers that are there."""
        found = await self.source.find({"headrace.namespace": NAMESPACE}, Which(""))
        return [container["Names"][0] for container in found]


@asynccontextmanager
async def bench(host: str, **options: Any) -> AsyncIterator[Bench]:
    """Opened, and closed with nothing left."""
    made = Bench(host, options)
    async with made._instances.reporting():
        await made.setup.open()
        try:
            yield made
        finally:
            for name in await made.left():
                await made.engine.remove(name.lstrip("/"))
            await made.setup.close_pool()


def on_engine(
    engine: str, test: Callable[[Bench], Coroutine[Any, Any, None]], bound_s: float, **options: Any
) -> None:
    """Runs a test with a setup on this engine, for a bounded time."""

    async def main() -> None:
        async with asyncio.timeout(bound_s), bench(engine, **options) as made:
            await test(made)

    asyncio.run(main())
