"""A namespace on a local broker, and its services as processes."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.infra import local
from headrace.schemas.events import Event, PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES, Topic, Topics
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.namespace.apply import apply
from headrace.services.namespace.cluster_config import ClusterConfig, write_resolved
from headrace.services.namespace.connect import connect
from headrace.services.operate.processes import headrace_command
from headrace.services.operate.run.supervisor import ChildSpec, Supervisor
from headrace.services.worker.service_context import ServiceContext

START_S = 300.0
"""A service has joined its consumer group by then, even on a busy machine."""


@contextmanager
def a_stack(*, lasting: bool = False) -> Iterator[ClusterConfig]:
    """A Kafka and a registry of their own, on free ports; gone afterwards, data and all.

    A Kafka that is `lasting` optimizes its code meanwhile, as that of `headrace run` does.
    """
    with TemporaryDirectory(prefix="headrace-bench-") as folder:
        state = Path(folder)
        try:
            stack = local.up(
                state, kafka_port=0, registry_port=0, owner_pid=os.getpid(), lasting=lasting
            )
            yield ClusterConfig(state).connected(stack.bootstrap_servers, stack.registry_url)
        finally:
            local.down(state, wipe=True)


@dataclass
class Deployment:
    """One recipe's run in a fresh namespace."""

    recipe: Recipe
    cluster: ClusterConfig
    log: EventLog

    @asynccontextmanager
    async def serving(
        self, *services: str, command: Callable[..., tuple[str, ...]] = headrace_command
    ) -> AsyncIterator[Supervisor]:
        """Runs services as child processes: `agent`, `env`, … one process for each name given.

        `command` makes the command line of `headrace` with given arguments.
        """
        path = write_resolved(self.recipe, self.cluster.state)
        specs = [
            ChildSpec(
                f"{service}-{number}",
                command("serve", service, str(path), "--parent-fd", "{parent_fd}"),
            )
            for number, service in enumerate(services)
        ]
        logs = self.cluster.state / self.log.topics.namespace / "logs"
        supervisor = Supervisor(specs, logs, on_change=print)
        await supervisor.start()
        supervisor.send_cluster(self.cluster.to_json())
        try:
            yield supervisor
        finally:
            await supervisor.stop()

    async def publish_initial(self) -> None:
        """Has the trainer publish version 0, and ends it."""
        async with self.serving("trainer"):
            await self.first(POLICIES, PolicyPublished)

    async def first(self, topic: Topic[Any], kind: type[Event]) -> Event:
        """Waits for the first event of a topic."""
        async with asyncio.timeout(START_S), self.following(topic) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.event, kind)
                return delivery.event
        raise AssertionError("a topic is followed without end")

    @asynccontextmanager
    async def following(
        self, topic: Topic[Any], policy: str | None = None
    ) -> AsyncIterator[AsyncIterator[Delivery[Event]]]:
        """A topic's events, from the first on, without end."""
        partitions = self.log.topics.partitions_of(topic, policy)
        reader = follow_events(self.log, dict.fromkeys(partitions, "first"))

        async def deliveries() -> AsyncIterator[Delivery[Event]]:
            async for item in reader:
                if not isinstance(item, CaughtUp):
                    yield item

        try:
            yield deliveries()
        finally:
            await reader.aclose()


@asynccontextmanager
async def deployed(cluster: ClusterConfig, recipe: Recipe) -> AsyncIterator[Deployment]:
    """Makes a fresh namespace for a recipe."""
    namespace = f"{recipe.name}-{uuid.uuid4().hex[:8]}"
    cluster = replace(cluster, namespace=namespace)
    async with connect(cluster, "bench") as connection:
        topics = Topics(
            namespace,
            tuple(recipe.policies),
            recipe.partitions,
            pool_partitions=recipe.pool_partitions,
        )
        log = await connection.writing_log(topics)
        await apply(log, recipe)
        yield Deployment(recipe, cluster, log)


@asynccontextmanager
async def a_worker(
    deployment: Deployment,
    name: str,
    run: Callable[[ServiceContext], Coroutine[Any, Any, None]],
    recipe: Recipe | None = None,
) -> AsyncIterator[None]:
    """Runs a service's worker in this process until the context ends, maybe with its own recipe."""
    cluster = deployment.cluster
    async with connect(cluster, name) as connection:
        log = await connection.writing_log(deployment.log.topics)
        state = cluster.state / name
        state.mkdir(exist_ok=True)
        stopping, blobs = asyncio.Event(), cluster.open_blobs("bench")
        context = ServiceContext(
            log, recipe or deployment.recipe, blobs, name, state, stopping, asyncio.Event()
        )
        running = asyncio.create_task(run(context))
        try:
            yield
        finally:
            stopping.set()
            await running
