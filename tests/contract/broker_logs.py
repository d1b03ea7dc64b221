"""The two logs that the contract suite holds to one contract, and processes on them to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from headrace.errors import HeadraceError
from headrace.services.kafka.broker import Broker, Outgoing, Partition
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from tests.contract import broker_member
from tests.memory.memory_broker import MemoryBroker, MemoryCluster

SESSION_S = 2.0
"""Short, so that a silent member's loss is soon seen."""


class OtherMember(Protocol):
    """A member of a consumer group in another process: see `broker_member`."""

    async def hear(self) -> str:
        """The next line that it says."""

    def tell(self, line: str) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def kill(self) -> None: ...


class Log(Protocol):
    """A log under test."""

    def client(self, name: str, session_s: float) -> Broker:
        """The log as one more process sees it. The test closes it."""

    def member(self, topic: str, group: str) -> AbstractAsyncContextManager[OtherMember]:
        """A context in which an OtherMember runs."""

    async def expire(self, partition: Partition, before: int) -> None:
        """Deletes records, as retention does."""

    async def leave_open(self, writer: str, record: Outgoing) -> None:
        """Writes a record in a transaction that stays open."""


class MemoryMember:
    """A member in this process, on a client of its own."""

    def __init__(self, client: MemoryBroker, topic: str, group: str) -> None:
        self._client = client
        self._told: asyncio.Queue[str] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self.hear = self._said.get
        self.tell = self._told.put_nowait
        self.freeze = client.freeze
        self.thaw = client.thaw
        self.task = asyncio.create_task(
            broker_member.take_part(client, topic, group, self._told.get, self._said.put_nowait)
        )

    def kill(self) -> None:
        self._client.kill()


class MemoryLog:
    """The in-memory log."""

    def __init__(self) -> None:
        self._cluster = MemoryCluster(session_s=SESSION_S)

    def client(self, name: str, session_s: float) -> Broker:
        self._cluster.session_s = session_s
        return self._cluster.client(name)

    @asynccontextmanager
    async def member(self, topic: str, group: str) -> AsyncIterator[OtherMember]:
        member = MemoryMember(self._cluster.client("member"), topic, group)
        yield member
        member.kill()
        member.task.cancel()
        with suppress(asyncio.CancelledError, HeadraceError):
            await member.task

    async def expire(self, partition: Partition, before: int) -> None:
        self._cluster.expire(partition, before)

    async def leave_open(self, writer: str, record: Outgoing) -> None:
        state = self._cluster.state
        state.begin(writer, state.fence(writer), [record])


class KafkaMember:
    """A member in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hear(self) -> str:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        assert line, "the member has ended"
        return line.strip()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()


class KafkaLog:
    """A real Kafka."""

    def __init__(self, servers: str) -> None:
        self._servers = servers
        self._left_open: list[Producer] = []

    def client(self, name: str, session_s: float) -> Broker:
        return KafkaBroker(KafkaSettings(self._servers, name, session_timeout_s=session_s))

    @asynccontextmanager
    async def member(self, topic: str, group: str) -> AsyncIterator[OtherMember]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            broker_member.__file__,
            *(self._servers, topic, group, str(SESSION_S)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        try:
            yield KafkaMember(process)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()

    async def expire(self, partition: Partition, before: int) -> None:
        at = TopicPartition(partition.topic, partition.number, before)
        with AdminClient({"bootstrap.servers": self._servers}) as admin:
            for future in admin.delete_records([at]).values():
                await asyncio.wrap_future(future)

    async def leave_open(self, writer: str, record: Outgoing) -> None:
        def write() -> None:
            producer = Producer({"bootstrap.servers": self._servers, "transactional.id": writer})
            producer.init_transactions(10)
            producer.begin_transaction()
            producer.produce(record.topic, record.value, record.key, record.partition or 0)
            assert producer.flush(10) == 0
            self._left_open.append(producer)  # Its end would abort the transaction.

        await asyncio.to_thread(write)
