"""Plain sends through one idempotent producer.

One thread polls it for delivery reports, and wakes the asyncio loop once for all of a poll. For
records that are patient it waits, since most loops soon wake up for records that they read, and
call `collect` then. To wake a loop that sleeps costs more than to handle a report.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from functools import partial
from math import inf
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, Message

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.broker import Outgoing, Position
from headrace.services.kafka.client_settings import DELIVERY_S, KafkaSettings
from headrace.services.kafka.convert import location, make_producer, produce
from headrace.services.kafka.failures import error_of, failure

POLL_S = 0.1
PATIENCE_S = 0.02
"""How long the report of a patient record waits for the loop."""
FULL_S = 0.01
"""How long a sender waits before it tries again, if librdkafka's queue is full."""
CLOSE_S, PURGE_S = 3.0, 1.0
"""How long `close` waits for records in flight, and for the reports of those that it drops."""

_Delivered = tuple[asyncio.Future[Position], Position | HeadraceError]


class Sender:
    """Sends records of one process, in order within a partition."""

    def __init__(self, settings: KafkaSettings, linger_ms: int = 0) -> None:
        """A record waits `linger_ms` for others that the same request can carry."""
        self._loop = asyncio.get_running_loop()
        self._producer = make_producer(settings.producer(linger_ms))
        self._delivered: deque[_Delivered] = deque()
        self._due = inf
        """When the thread wakes the loop for what was delivered."""
        self._turn = asyncio.Lock()
        """Keeps the records in order while the queue is full."""
        self._waiting = 0
        """How many senders wait for their turn."""
        self._stopping = False
        self._broken: HeadraceError | None = None
        """Why nothing can be sent any more."""
        self._thread = threading.Thread(target=self._poll, name="kafka-sends", daemon=True)
        self._thread.start()

    async def send(self, record: Outgoing) -> Position:
        """Writes one record; returns once it is durable. DependencyError after a bounded wait.

        After an error that librdkafka calls fatal, for example because this principal may write to
        no topic, each send raises it.
        """
        future: asyncio.Future[Position] = self._loop.create_future()
        if self._waiting or not self._produce(record, future):
            self._waiting += 1
            try:
                await self._produce_in_turn(record, future)
            finally:
                self._waiting -= 1
        return await future

    async def close(self) -> None:
        """Waits for records in flight, bounded. Those that remain fail."""
        self._stopping = True
        await asyncio.to_thread(self._thread.join)

    async def _produce_in_turn(self, record: Outgoing, future: asyncio.Future[Position]) -> None:
        """Waits for room in librdkafka's queue, behind all who wait for it already."""
        late = monotonic() + 2 * DELIVERY_S
        async with self._turn:
            while not self._produce(record, future):
                if monotonic() > late:
                    raise DependencyError(
                        f"the producer's queue was full for {2 * DELIVERY_S:.0f} s, so a record "
                        f"for {record.topic} was not sent. Is Kafka overloaded or down?"
                    )
                await asyncio.sleep(FULL_S)

    def _produce(self, record: Outgoing, future: asyncio.Future[Position]) -> bool:
        """Gives a record to librdkafka. False if its queue is full."""
        if self._stopping:
            raise DependencyError(f"can't send to {record.topic}: this broker object is closed")
        if self._broken is not None:
            raise self._broken
        try:
            report = partial(self._on_delivery, future, PATIENCE_S if record.patient else 0.0)
            produce(self._producer, record, report)
        except BufferError:
            return False
        except KafkaException as exception:
            what = f"can't send {len(record.value)} bytes to {record.topic}"
            raise failure(what, error_of(exception)) from exception
        return True

    def _on_delivery(
        self,
        future: asyncio.Future[Position],
        patience_s: float,
        error: KafkaError | None,
        message: Message,
    ) -> None:
        if error is None and message.offset() is None:
            what = f"the broker did not say where a record in {message.topic()} is"
            self._delivered.append((future, DependencyError(what)))
        elif error is not None:
            wrong = self._broken or failure(f"can't send to {message.topic()}", error)
            self._delivered.append((future, wrong))
        else:
            self._delivered.append((future, Position(*location(message))))
        self._due = min(self._due, monotonic() + patience_s)

    def _poll(self) -> None:
        """In the thread: serves delivery reports until the sender is closed."""
        while not self._stopping:
            self._serve()
        deadline = monotonic() + CLOSE_S
        while len(self._producer) and monotonic() < deadline:
            self._serve()
        self._producer.purge()  # it does not wait for the threads that purge
        deadline = monotonic() + PURGE_S
        while len(self._producer) and monotonic() < deadline:
            self._serve()
        try:
            self._producer.close()
        finally:
            self._hand_over()

    def _serve(self) -> None:
        try:
            # librdkafka counts whole milliseconds: without one more it would not wait at the end.
            self._producer.poll(min(POLL_S, max(0.0, self._due - monotonic()) + 0.001))
        except KafkaException as exception:
            self._break(failure("can't send", error_of(exception)))
        except Exception as error:  # a callback of ours: without this thread, sends would hang
            self._break(DependencyError(f"can't send: {error!r}"))
        self._hand_over()

    def _break(self, error: HeadraceError) -> None:
        """Fails all records in flight, and all later ones."""
        self._broken = error
        self._producer.purge()

    def _hand_over(self) -> None:
        if monotonic() < self._due and not self._stopping:
            return
        self._due = inf
        if not self._delivered:  # The loop has collected them.
            return
        try:
            self._loop.call_soon_threadsafe(self.collect)
        except RuntimeError:  # The loop is closed, so no sender waits any more.
            self._stopping = True

    def collect(self) -> None:
        """On the loop: tells the senders of all records that were delivered."""
        while self._delivered:
            future, outcome = self._delivered.popleft()
            if future.done():  # Its sender was cancelled.
                continue
            if isinstance(outcome, Position):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
