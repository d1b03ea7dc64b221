"""Connects to the broker and the registry, and opens the logs of namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.errors import DependencyError
from headrace.schemas.codec import Codec
from headrace.schemas.topics import Topics
from headrace.services.base.redactor import REDACTOR
from headrace.services.kafka.broker import Broker
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.kafka.registry import Registry
from headrace.services.log.event_log import EventLog
from headrace.services.log.request_signatures import RequestSigner
from headrace.services.namespace.cluster_config import ClusterConfig


def locate(cluster: ClusterConfig) -> ClusterConfig:
    """Fills in the addresses of the local stack if the configuration has no addresses.

    The credentials of a secure local stack are used, unless others are named. Raises
    DependencyError if no local stack runs either, or its certificates have ended.
    """
    if cluster.bootstrap_servers is not None:
        return cluster
    from headrace.infra import local

    stack = local.find(cluster.state)
    if stack is None:
        raise DependencyError(
            f"no local stack runs in {cluster.state}. Start one with `headrace up`, or name a "
            "cluster with --bootstrap-servers and --registry-url"
        )
    local.require_valid(stack.valid_until, cluster.state)
    return cluster.connected(stack.bootstrap_servers, stack.registry_url, stack.credentials)


@dataclass(frozen=True)
class Connection:
    """A broker and its schema registry. It opens the logs of namespaces."""

    broker: Broker
    registry: Registry
    source: str
    """Name of the connected program: the CloudEvents source of the events that it writes."""
    signer: RequestSigner = field(default_factory=RequestSigner.of_environment)
    """Signs the requests that it writes, such as tasks."""

    def log(self, topics: Topics) -> EventLog:
        """Opens the log of a namespace for reading only: it never writes to the namespace."""
        return EventLog(self.broker, topics, Codec(), self.registry, self.source, read_only=True)

    async def writing_log(self, topics: Topics) -> EventLog:
        """Opens the log of a namespace, and registers the schemas that are not registered yet.

        Raises DependencyError if the registry does not answer.
        """
        self.broker.prepare_sends(gathered=False)
        codec = Codec()
        await asyncio.to_thread(self.registry.prepare, codec, topics)
        return EventLog(self.broker, topics, codec, self.registry, self.source, signer=self.signer)


@asynccontextmanager
async def connect(
    cluster: ClusterConfig, source: str, signer: RequestSigner | None = None
) -> AsyncIterator[Connection]:
    """Connects to a cluster that `locate` has returned, and closes the connection at the end.

    `signer` signs requests, by default with the key of HEADRACE_REQUEST_KEY. Raises
    DependencyError if no broker answers within 5 s.
    """
    assert cluster.bootstrap_servers is not None
    assert cluster.registry_url is not None
    for name, secret in cluster.secrets():
        REDACTOR.add(name, secret)
    registry = Registry(cluster.registry_url, cluster.schema_ids, cluster.registry_properties())
    broker = KafkaBroker(
        KafkaSettings(cluster.bootstrap_servers, f"headrace-{source}", cluster.broker_properties())
    )
    try:
        await broker.check()
        yield Connection(broker, registry, source, signer or RequestSigner.of_environment())
    finally:
        await broker.close()
        registry.close()
