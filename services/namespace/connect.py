"""Opens a namespace's log: the one place where a broker, a registry and a codec are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.errors import DependencyError
from headrace.schemas.codec import Codec
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Broker
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.kafka.registry import Registry
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig


def locate(cluster: ClusterConfig) -> ClusterConfig:
    """The same, with the local stack's addresses where none are given.

    DependencyError where neither is there.
    """
    if cluster.bootstrap_servers is not None:
        if cluster.registry_url is None:
            raise DependencyError("--bootstrap-servers needs --registry-url beside it")
        return cluster
    from headrace.infra import local

    stack = local.find(cluster.state)
    if stack is None:
        raise DependencyError(
            f"no local stack runs in {cluster.state}: start one with `headrace up`, or name a "
            "cluster with --bootstrap-servers and --registry-url"
        )
    return cluster.connected(stack.bootstrap_servers, stack.registry_url)


@dataclass(frozen=True)
class Connection:
    """A broker and its registry, from which logs are made."""

    broker: Broker
    registry: Registry
    source: str
    """Who is connected: the CloudEvents source of what it writes."""

    def log(self, topics: Topics) -> EventLog:
        """The typed log of a namespace, to read from: it leaves no trace there."""
        return EventLog(self.broker, topics, Codec(), self.registry, self.source, read_only=True)

    async def writing_log(self, topics: Topics) -> EventLog:
        """The typed log of a namespace, with every topic's schema registered.

        What is there stays. DependencyError where the registry is out of reach.
        """
        codec = Codec()
        await asyncio.to_thread(self.registry.prepare, codec, topics)
        return EventLog(self.broker, topics, codec, self.registry, self.source)


@asynccontextmanager
async def connect(cluster: ClusterConfig, source: str) -> AsyncIterator[Connection]:
    """Connects to the place that `locate` found, and closes it all at the end.

    DependencyError within 5 s where no broker answers.
    """
    assert cluster.bootstrap_servers is not None
    assert cluster.registry_url is not None
    registry = Registry(cluster.registry_url)
    broker = KafkaBroker(
        cluster.bootstrap_servers,
        client_id=f"headrace-{source}",
        properties=cluster.kafka_properties,
    )
    try:
        await broker.check()
        yield Connection(broker, registry, source)
    finally:
        await broker.close()
        registry.close()
