"""The `Broker` of `broker.py` on a Kafka cluster. Only this package imports `confluent_kafka`.

Connections are opened when they are first needed: a process that only reads has no producer.
Blocking calls run in threads of their own. Each has a time limit, and `close` ends them all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeVar

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
from headrace.services.kafka.producer import CrowdedSender

logger = logging.getLogger(__name__)

_Client = KafkaReader | KafkaSubscription | KafkaFencedWriter
C = TypeVar("C", bound=_Client)


class KafkaBroker(Admin, Broker):
    """The log on a Kafka cluster."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings)
        self._senders: dict[bool, CrowdedSender] = {}
        """By whether they always gather records, which delays them. Others don't wait for that."""
        self._fetcher: Fetcher | None = None
        self._opened: list[_Client] = []

    async def send(self, record: Outgoing) -> Position:
        return await self._sender(record.gathered).send(record)

    def prepare_sends(self, *, gathered: bool) -> None:
        # A record that librdkafka gets before it has a connection may wait for a second.
        self._sender(gathered)

    def reader(self) -> Reader:
        return self._open(KafkaReader(self._settings, self, self._collect))

    def subscribe(
        self,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> Subscription:
        return self._open(
            KafkaSubscription(
                self._settings, topics, consumer_group, on_assigned, on_revoked, self._collect
            )
        )

    async def fenced(self, writer: str) -> FencedWriter:
        fenced = KafkaFencedWriter(self._settings, writer)
        await fenced.fence()
        return self._open(fenced)

    async def fetch(self, positions: Sequence[Position]) -> list[Record]:
        if not positions:
            return []
        if self._fetcher is None:
            self._fetcher = Fetcher(self._settings)
        return await self._fetcher.fetch(positions)

    async def close(self) -> None:
        opened, self._opened = self._opened, []
        fetcher = [] if self._fetcher is None else [self._fetcher]
        every = (*opened, *self._senders.values(), *fetcher)
        closing = [*(one.close() for one in every), super().close()]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, HeadraceError):
                logger.warning("while closing: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _sender(self, gathered: bool) -> CrowdedSender:
        sender = self._senders.get(gathered)
        if sender is None:
            sender = self._senders[gathered] = CrowdedSender(self._settings, gathered=gathered)
        return sender

    def _collect(self) -> None:
        """Before what was read is handled: tells senders which records are durable."""
        for sender in self._senders.values():
            sender.collect()

    def _open(self, opened: C) -> C:
        """Notes what `close` must close, and forgets what is closed.

        A process can have at most 1,024 clients, because each has a thread-local variable of its
        own, and whoever reads a log opens a reader for it.
        """
        self._opened = [one for one in self._opened if not one.closed]
        self._opened.append(opened)
        return opened
