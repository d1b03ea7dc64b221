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
    FencedWriter,
    OnAssigned,
    OnRevoked,
    Outgoing,
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


class KafkaBroker(Admin, Broker):
    """The log on a Kafka cluster."""

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        client_id: str,
        properties: Mapping[str, str] | None = None,
        session_timeout_s: float = 6.0,
    ) -> None:
        """`KafkaSettings` documents the arguments. Raises UsageError if a property is reserved."""
        settings = KafkaSettings(
            bootstrap_servers,
            client_id,
            properties or {},
            session_timeout_s=session_timeout_s,
        )
        super().__init__(settings)
        self._sender: Sender | None = None
        self._fetcher: Fetcher | None = None
        self._fetches: ThreadPoolExecutor | None = None
        self._opened: list[KafkaReader | KafkaSubscription | KafkaFencedWriter] = []

    async def send(self, record: Outgoing) -> Position:
        """See Broker."""
        if self._sender is None:
            self._sender = Sender(self._settings)
        return await self._sender.send(record)

    def reader(self) -> Reader:
        """See Broker."""
        reader = KafkaReader(self._settings, self)
        self._opened.append(reader)
        return reader

    def subscribe(
        self,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> Subscription:
        """See Broker."""
        subscription = KafkaSubscription(
            self._settings, topics, consumer_group, on_assigned, on_revoked
        )
        self._opened.append(subscription)
        return subscription

    async def fenced(self, writer: str) -> FencedWriter:
        """See Broker."""
        fenced = KafkaFencedWriter(self._settings, writer)
        await fenced.fence()
        self._opened.append(fenced)
        return fenced

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        """See Broker."""
        if not positions:
            return []
        if self._fetches is None:
            self._fetches = ThreadPoolExecutor(1, thread_name_prefix="kafka-fetches")
            self._fetcher = Fetcher(self._settings)
        assert self._fetcher is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._fetches, self._fetcher.fetch, positions)

    async def close(self) -> None:
        """See Broker."""
        opened, self._opened = self._opened, []
        closing = [one.close() for one in opened]
        if self._sender is not None:
            closing.append(self._sender.close())
        if self._fetches is not None and self._fetcher is not None:
            fetches, fetcher = self._fetches, self._fetcher
            fetches.submit(fetcher.close)
            closing.append(asyncio.to_thread(fetches.shutdown))
        closing.append(super().close())
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, HeadraceError):
                logger.warning("while closing: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
