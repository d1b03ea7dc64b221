"""Opens a namespace's log: the one place where a broker, a registry and a codec are made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from schemas.codec import Codec
from schemas.topics import Topics
from services.errors import DependencyError
from services.kafka.client import KafkaBroker
from services.kafka.registry import Registry
from services.log import EventLog
from services.settings import Where


def locate(where: Where) -> Where:
    """The same, with the local stack's addresses where none are given.

    DependencyError where neither is there.
    """
    if where.bootstrap_servers is not None:
        if where.registry_url is None:
            raise DependencyError("--bootstrap-servers needs --registry-url beside it")
        return where
    from infra import local

    stack = local.find(where.state)
    if stack is None:
        raise DependencyError(
            f"no local stack runs in {where.state}: start one with `headrace up`, or name a "
            "cluster with --bootstrap-servers and --registry-url"
        )
    return where.connected(stack.bootstrap_servers, stack.registry_url)


@asynccontextmanager
async def open_broker(where: Where, source: str) -> AsyncIterator[KafkaBroker]:
    """A client of the broker, closed at the end. `source` names it in the broker's logs."""
    assert where.bootstrap_servers is not None, "locate() comes first"
    broker = KafkaBroker(
        where.bootstrap_servers, client_id=source, properties=where.kafka_properties
    )
    try:
        yield broker
    finally:
        await broker.close()


async def make_log(
    broker: KafkaBroker,
    where: Where,
    namespace: str,
    policies: Sequence[str],
    partitions: int,
    source: str,
) -> EventLog:
    """The typed log of a namespace. Registers every topic's schema: what is there stays.

    DependencyError where the registry is out of reach.
    """
    assert where.registry_url is not None, "locate() comes first"
    topics, codec = Topics(namespace, policies, partitions), Codec()
    registry = Registry(where.registry_url)
    await asyncio.to_thread(registry.prepare, codec, topics)
    return EventLog(broker, topics, codec, registry, source)
