"""The `Broker` of `broker.py` on a Kafka cluster. Only this package imports `confluent_kafka`.

Connections are opened when they are first needed: a process that only reads has no producer.
Blocking calls run in threads of their own. Each has a time limit, and `close` ends them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.errors import HeadraceError
from headrace.services.kafka.admin import Admin
from headrace.services.kafka.broker import (
    Broker,
    Committed,
    FencedWriter,
    OnAssigned,
    OnRevoked,
    Outgoing,
    Partition,
    Position,
    Reader,
    Record,
    Subscription,
)
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.consumer import KafkaReader, KafkaSubscription
from headrace.services.kafka.fenced import KafkaFencedWriter
from headrace.services.kafka.fetcher import Fetcher
from headrace.services.kafka.producer import Sender

logger = logging.getLogger(__name__)


class KafkaBroker:
    """The log on a Kafka cluster."""

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        client_id: str,
        properties: Mapping[str, str] | None = None,
        session_timeout_s: float = 6.0,
        replication: int | None = None,
    ) -> None:
        """`KafkaSettings` documents the arguments. Raises UsageError if a property is reserved."""
        self._settings = KafkaSettings(
            bootstrap_servers,
            client_id,
            properties or {},
            session_timeout_s=session_timeout_s,
            replication=replication,
        )
        self._admin = Admin(self._settings)
        self._sender: Sender | None = None
        self._fetcher: Fetcher | None = None
        self._fetches: ThreadPoolExecutor | None = None
        self._opened: list[KafkaReader | KafkaSubscription | KafkaFencedWriter] = []

    async def check(self) -> None:
        """Raises DependencyError within 5 s if no broker answers."""
        await self._admin.check()

    async def send(self, record: Outgoing) -> Position:
        """Writes one record; returns once it is durable. DependencyError after a bounded wait."""
        if self._sender is None:
            self._sender = Sender(self._settings)
        return await self._sender.send(record)

    def reader(self) -> Reader:
        """A reader of given partitions."""
        reader = KafkaReader(self._settings, self._admin)
        self._opened.append(reader)
        return reader

    def subscribe(
        self,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> Subscription:
        """Joins a consumer group. Called in the event loop, where the callbacks will run."""
        subscription = KafkaSubscription(
            self._settings, topics, consumer_group, on_assigned, on_revoked
        )
        self._opened.append(subscription)
        return subscription

    async def fenced(self, writer: str) -> FencedWriter:
        """Becomes the sole writer of that name; its predecessor is fenced on return."""
        fenced = KafkaFencedWriter(self._settings, writer)
        await fenced.fence()
        self._opened.append(fenced)
        return fenced

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """The records at these positions, in the given order. RecordsLost if one is gone."""
        if not positions:
            return []
        if self._fetches is None:
            self._fetches = ThreadPoolExecutor(1, thread_name_prefix="kafka-fetches")
            self._fetcher = Fetcher(self._settings)
        assert self._fetcher is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._fetches, self._fetcher.fetch, positions)

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Creates the topics that do not exist: name to (partitions, configuration).

        Raises UsageError if one exists with another number of partitions.
        """
        await self._admin.create_topics(topics)

    async def delete_topics(self, topics: Sequence[str]) -> None:
        """Deletes the topics that exist."""
        await self._admin.delete_topics(topics)

    async def list_topics(self) -> dict[str, int]:
        """The number of partitions of every topic, by name, without Kafka's own topics."""
        return await self._admin.list_topics()

    async def topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        """The configuration of these topics, by Kafka's names. DependencyError if one is absent."""
        return await self._admin.topic_settings(topics)

    async def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool = False
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset and its end; `include_uncommitted` as in `Broker`."""
        return await self._admin.ends(partitions, include_uncommitted=include_uncommitted)

    async def offsets_at(
        self, partitions: Sequence[Partition], timestamp: float
    ) -> dict[Partition, int]:
        """The offset of each partition's first record at or after a time, or else its end."""
        return await self._admin.offsets_at(partitions, timestamp)

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's commits. A partition without one is absent."""
        return await self._admin.committed(consumer_group, partitions)

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 for partitions without a commit. The group must have no member."""
        await self._admin.commit_first(consumer_group, partitions)

    async def close(self) -> None:
        """Waits a few seconds for what is in flight, and closes everything that it opened."""
        opened, self._opened = self._opened, []
        closing = [one.close() for one in opened]
        if self._sender is not None:
            closing.append(self._sender.close())
        if self._fetches is not None and self._fetcher is not None:
            fetches, fetcher = self._fetches, self._fetcher
            fetches.submit(fetcher.close)
            closing.append(asyncio.to_thread(fetches.shutdown))
        closing.append(self._admin.close())
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, HeadraceError):
                logger.warning("while closing: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome


def _keeps_the_contract(broker: KafkaBroker) -> Broker:
    """For mypy: a KafkaBroker is a Broker."""
    return broker
