"""A sole writer: a transactional producer that works through one transaction after the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from confluent_kafka import (
    KafkaError,
    KafkaException,
    Message,
    Producer,
)

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.broker import Committed, Outgoing, Partition, Position
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import make_consumer, make_producer, offsets_of, to_position
from headrace.services.kafka.failures import FENCED, error_of, failure

logger = logging.getLogger(__name__)

TAKE_OVER_S = 20.0
COMMIT_S = 20.0
"""How long a commit is retried. After that its outcome is unknown."""
SLICE_S = 1.0
ATTEMPTS = 3
"""Transactions tried for one write, where the brokers made us abort."""

R = TypeVar("R")


class KafkaFencedWriter:
    """A sole writer: `transactional.id` is its name. `take_over` comes first.

    Its thread runs one call at a time. A cancelled `write` still runs to its end there.
    """

    def __init__(self, settings: KafkaSettings, writer: str) -> None:
        self._settings = settings
        self._writer = writer
        self._producer: Producer | None = None
        self._groups: dict[str, Any] = {}
        self._broken: HeadraceError | None = None
        """Why nothing can be written any more."""
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kafka-{writer}")

    async def take_over(self) -> None:
        """Cuts the predecessor off at the brokers; they abort its open transaction."""
        try:
            await self._run(self._take_over)
        except BaseException:
            await self.close()
            raise

    async def write(
        self,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed] | None = None,
        consumer_group: str = "",
    ) -> list[Position]:
        """Writes all records, and the group's places, or nothing: one transaction."""
        if not records and not commits:
            return []
        return await self._run(partial(self._write, records, commits or {}, consumer_group))

    async def close(self) -> None:
        """Waits for the transaction that runs, if one does, and ends the thread."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._forget)
            await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, work: Callable[[], R]) -> R:
        if self._closed:
            raise DependencyError(f"the writer {self._writer} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _take_over(self) -> None:
        self._producer = make_producer(self._settings.transactional(self._writer))
        try:
            self._patiently(self._producer.init_transactions, TAKE_OVER_S)
        except KafkaException as exception:
            what = f"can't take over as writer {self._writer}"
            raise failure(what, error_of(exception)) from exception

    def _patiently(self, call: Callable[[float], object], limit_s: float) -> None:
        """Calls until it works, as librdkafka allows where it says `retriable`: a time-out, say.

        In slices, so that `close` does not wait for more than one.
        """
        deadline = monotonic() + limit_s
        while True:
            try:
                call(SLICE_S)
            except KafkaException as exception:
                error = error_of(exception)
                late = self._closed or monotonic() > deadline
                if late or error.txn_requires_abort() or not error.retriable():
                    raise
            else:
                return

    def _write(
        self,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed],
        consumer_group: str,
    ) -> list[Position]:
        for attempt in range(1, ATTEMPTS + 1):
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            assert self._producer is not None
            try:
                self._producer.begin_transaction()
                positions = self._fill(self._producer, records, commits, consumer_group)
                self._commit(self._producer)
                return positions
            except KafkaException as exception:
                error = error_of(exception)
                wrong = failure(f"can't write as {self._writer}", error)
                self._abort(self._producer, error, wrong)
                if attempt == ATTEMPTS or not (error.txn_requires_abort() or error.retriable()):
                    raise wrong from exception
                logger.warning("%s: aborted, attempt %d of %d", wrong, attempt, ATTEMPTS)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _fill(
        self,
        producer: Producer,
        records: Sequence[Outgoing],
        commits: Mapping[Partition, Committed],
        consumer_group: str,
    ) -> list[Position]:
        """Puts all into the open transaction. Where a record fails, the commit says so."""
        positions: dict[int, Position] = {}
        open_records = len(records)

        def on_delivery(index: int, error: KafkaError | None, message: Message) -> None:
            nonlocal open_records
            open_records -= 1
            if error is None:
                positions[index] = to_position(message)

        for index, record in enumerate(records):
            _produce(producer, record, partial(on_delivery, index))
        if commits:
            group = self._group(consumer_group)
            offsets = offsets_of(commits)
            self._patiently(
                lambda slice_s: producer.send_offsets_to_transaction(offsets, group, slice_s),
                COMMIT_S,
            )
        # Not `flush()`: of a fenced producer it raises what is no exception (confluent-kafka 2.16).
        # Each record is delivered or given up within its `message.timeout.ms`.
        while open_records and not self._closed:
            producer.poll(SLICE_S)
        return [positions[index] for index in sorted(positions)]

    def _commit(self, producer: Producer) -> None:
        """Commits. An outcome that stays unknown breaks the writer: only a new one finds out."""
        try:
            self._patiently(producer.commit_transaction, COMMIT_S)
        except KafkaException as exception:
            error = error_of(exception)
            if error.txn_requires_abort() or error.fatal() or error.code() in FENCED:
                raise
            self._broken = DependencyError(
                f"the writer {self._writer} does not know whether its transaction counts "
                f"({error.name()}): this process must end; a new one finds out"
            )
            raise self._broken from exception

    def _abort(self, producer: Producer, error: KafkaError, wrong: HeadraceError) -> None:
        """Takes the open transaction back. Where that can't be, the writer is done for."""
        if error.fatal() or error.code() in FENCED:
            self._broken = wrong
            return
        try:
            self._patiently(producer.abort_transaction, COMMIT_S)
        except KafkaException as exception:
            self._broken = failure(f"can't abort as {self._writer}", error_of(exception))

    def _group(self, consumer_group: str) -> Any:
        """What stands for a consumer group in a transaction. It joins nothing, asks nobody."""
        if consumer_group not in self._groups:
            consumer = make_consumer(self._settings.member(consumer_group))
            self._groups[consumer_group] = consumer.consumer_group_metadata()
            consumer.close()
        return self._groups[consumer_group]

    def _forget(self) -> None:
        """Drops the producer in its thread. Not `close()`: that would abort, and what an unknown
        outcome is must stay the brokers' to say."""
        self._producer = None


def _produce(
    producer: Producer, record: Outgoing, on_delivery: Callable[[KafkaError | None, Message], None]
) -> None:
    """Hands a record to librdkafka; where its queue is full, waits for room, bounded."""
    deadline = monotonic() + COMMIT_S
    while True:
        try:
            producer.produce(
                record.topic,
                record.value,
                record.key,
                -1 if record.partition is None else record.partition,
                on_delivery=on_delivery,
                headers=list(record.headers),
            )
        except BufferError:
            if monotonic() > deadline:
                raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
            producer.poll(0.1)
        else:
            return
