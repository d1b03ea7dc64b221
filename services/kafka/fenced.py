"""A sole writer: a transactional producer that runs one transaction at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Message

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.broker import FencedWriter, Outgoing, Position
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import location, make_producer, produce
from headrace.services.kafka.failures import FENCED, as_failure, error_of, failure

logger = logging.getLogger(__name__)

FENCE_S = 20.0
COMMIT_S = 20.0
"""How long a commit is retried. After that, its outcome is unknown."""
SLICE_S = 1.0
ATTEMPTS = 3
"""How often a write is tried, if the brokers abort its transaction."""

R = TypeVar("R")


class KafkaFencedWriter(FencedWriter):
    """A sole writer. Its name is the `transactional.id`. Call `fence` first.

    Its thread runs one call at a time. A `write` that is cancelled still runs to its end there.
    """

    def __init__(self, settings: KafkaSettings, writer: str) -> None:
        self._writer = writer
        self._producer = make_producer(settings.transactional(writer))
        self._broken: HeadraceError | None = None
        """Why this writer can't write any more."""
        self._closed = False
        self.closed = False
        """Whether it has been closed to the end."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kafka-{writer}")

    async def fence(self) -> None:
        """Fences the predecessor at the brokers, which abort its open transaction."""
        try:
            with as_failure(f"can't become the writer {self._writer}"):
                await self._run(partial(self._patiently, self._producer.init_transactions, FENCE_S))
        except BaseException:
            await self.close()
            raise

    async def write(self, records: Sequence[Outgoing]) -> list[Position]:
        return await self._run(partial(self._write, records)) if records else []

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._forget)
        await asyncio.to_thread(self._thread.shutdown)
        self.closed = True

    async def _run(self, work: Callable[[], R]) -> R:
        if self._closed:
            raise DependencyError(f"the writer {self._writer} is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _patiently(self, call: Callable[[float], object], limit_s: float) -> None:
        """Repeats a call while librdkafka says that its error is `retriable`, such as a time-out.

        Each call takes a slice of the time, so that `close` waits for one slice at most.
        """
        deadline = monotonic() + limit_s
        while True:
            try:
                call(SLICE_S)
                return
            except KafkaException as exception:
                error = error_of(exception)
                late = self._closed or monotonic() > deadline
                if late or error.txn_requires_abort() or not error.retriable():
                    raise

    def _write(self, records: Sequence[Outgoing]) -> list[Position]:
        for attempt in range(1, ATTEMPTS + 1):
            if self._broken is not None:
                raise type(self._broken)(str(self._broken))
            try:
                self._producer.begin_transaction()
                positions = self._fill(records)
                self._commit()
                return positions
            except KafkaException as exception:
                error = error_of(exception)
                wrong = failure(f"can't write as {self._writer}", error)
                self._abort(error, wrong)
                if attempt == ATTEMPTS or not (error.txn_requires_abort() or error.retriable()):
                    raise wrong from exception
                logger.warning("%s: aborted, attempt %d of %d", wrong, attempt, ATTEMPTS)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _fill(self, records: Sequence[Outgoing]) -> list[Position]:
        """Writes all records into the open transaction. If a record fails, the commit fails."""
        positions: dict[int, Position] = {}
        open_records, unplaced = len(records), False

        def on_delivery(index: int, error: KafkaError | None, message: Message) -> None:
            nonlocal open_records, unplaced
            open_records -= 1
            if error is None and message.offset() is not None:
                positions[index] = Position(*location(message))
            unplaced |= error is None and message.offset() is None

        for index, record in enumerate(records):
            self._produce(record, partial(on_delivery, index))
        # Not `flush()`: on a fenced producer it raises an object that is no exception
        # (confluent-kafka 2.16). Each record is delivered or fails within `message.timeout.ms`.
        while open_records and not self._closed:
            self._producer.poll(SLICE_S)
        if unplaced:
            self._broken = DependencyError(
                f"the brokers did not say where records of the writer {self._writer} are. This "
                "process must end; a new one begins with what is committed"
            )
            raise self._broken
        return [positions[index] for index in sorted(positions)]

    def _produce(
        self, record: Outgoing, on_delivery: Callable[[KafkaError | None, Message], None]
    ) -> None:
        """Gives a record to librdkafka. If its queue is full, waits for room, bounded."""
        deadline = monotonic() + COMMIT_S
        while True:
            try:
                produce(self._producer, record, on_delivery)
                return
            except BufferError:
                if monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
                self._producer.poll(0.1)

    def _commit(self) -> None:
        """Commits. If the outcome stays unknown, this writer fails from then on."""
        try:
            self._patiently(self._producer.commit_transaction, COMMIT_S)
        except KafkaException as exception:
            error = error_of(exception)
            if error.txn_requires_abort() or error.fatal() or error.code() in FENCED:
                raise
            self._broken = DependencyError(
                f"the writer {self._writer} could not learn whether its transaction was "
                f"committed ({error.name()}). This process must end; a new one finds out"
            )
            raise self._broken from exception

    def _abort(self, error: KafkaError, wrong: HeadraceError) -> None:
        """Aborts the open transaction. If that fails, this writer fails from then on."""
        if error.fatal() or error.code() in FENCED:
            self._broken = wrong
            return
        try:
            self._patiently(self._producer.abort_transaction, COMMIT_S)
        except KafkaException as exception:
            self._broken = failure(f"can't abort as {self._writer}", error_of(exception))

    def _forget(self) -> None:
        """Drops the producer in its thread, without `close()`.

        `close()` would abort a transaction whose outcome is unknown. The brokers must decide it.
        """
        del self._producer
