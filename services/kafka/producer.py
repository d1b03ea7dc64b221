"""Plain sends through idempotent producers.

One thread polls each for delivery reports, and wakes the asyncio loop once for all of a poll. For
records that are patient it waits, since most loops soon wake up for records that they read, and
call `collect` then. To wake a loop that sleeps costs more than to handle a report.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from functools import partial
from math import inf
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, Message

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.broker import Outgoing, Position
from headrace.services.kafka.client_settings import (
    CROWDED_GATHER_MS,
    CROWDED_MS,
    DELIVERY_S,
    GATHER_MS,
    KafkaSettings,
)
from headrace.services.kafka.convert import location, make_producer, produce
from headrace.services.kafka.failures import error_of, failure
from headrace.services.kafka.scarcity import SCARCE, ProcessorWait

logger = logging.getLogger(__name__)

POLL_S = 0.1
PATIENCE_S = 0.02
"""How long the report of a patient record waits for the loop."""
FULL_S = 0.002
"""How long a sender waits before it tries again, if the producer takes nothing now."""
LOOK_S, MANY, MANY_GATHERED = 1.0, 100.0, 250.0
"""How often a sender looks whether records are crowded, and from how many a second of one topic
they may be: fewer would not come together, as a request has records of one partition only."""
CONNECT_S = 1.0
"""How long a new producer has to connect before it gets a record, which may wait for so long."""
CHANGE_S, REST_S = 0.05, 1.0
"""How long a change of producers may hold up sends, and for how long no other one is tried then."""
CLOSE_S, PURGE_S = 3.0, 1.0
"""How long `close` waits for records in flight, and for the reports of those that it drops."""

_Delivered = tuple[asyncio.Future[Position], Position | HeadraceError]
_Waiting = tuple[Outgoing, asyncio.Future[Position], float]
"""A record, its sender, and when it has waited for too long."""


class Sender:
    """Sends records of one process, in order within a partition."""

    def __init__(self, settings: KafkaSettings, linger_ms: int = 0) -> None:
        """A record waits `linger_ms` for others that the same request can carry."""
        self._loop = asyncio.get_running_loop()
        self._producer = make_producer(settings.producer(linger_ms))
        self._delivered: deque[_Delivered] = deque()
        self._due = inf
        """When the thread wakes the loop for what was delivered."""
        self._queue: deque[_Waiting] = deque()
        """Records that librdkafka does not take yet. Later ones wait behind them."""
        self.under_way = 0
        """Records that librdkafka has, or whose reports `collect` has not read."""
        self.uncertain = False
        """Whether a record has failed. It may become durable all the same, and later."""
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
        if self._queue or not self._produce(record, future):
            self._queue.append((record, future, monotonic() + 2 * DELIVERY_S))
            if len(self._queue) == 1:
                self._loop.call_later(FULL_S, self._produce_queued)
        return await future

    async def close(self) -> None:
        """Waits for records in flight, bounded. Those that remain fail."""
        self._stopping = True
        await asyncio.to_thread(self._thread.join)

    def _produce_queued(self) -> None:
        """Gives librdkafka what waits, in order, until it takes nothing more."""
        while self._queue:
            record, future, late = self._queue[0]
            try:
                if not (future.done() or self._produce(record, future)):
                    if monotonic() < late:
                        self._loop.call_later(FULL_S, self._produce_queued)
                        return
                    raise DependencyError(
                        f"the producer's queue was full for {2 * DELIVERY_S:.0f} s, so a record "
                        f"for {record.topic} was not sent. Is Kafka overloaded or down?"
                    )
            except Exception as error:  # The sender of this record must get it.
                future.set_exception(error)
            self._queue.popleft()

    def _produce(self, record: Outgoing, future: asyncio.Future[Position]) -> bool:
        """Gives a record to librdkafka. False if it takes none now."""
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
        self.under_way += 1
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
            self.under_way -= 1
            self.uncertain |= not isinstance(outcome, Position)
            if future.done():  # Its sender was cancelled.
                continue
            if isinstance(outcome, Position):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)


class CrowdedSender(Sender):
    """Sends each record soon, unless the process sends many and waits for processors.

    Then a second producer gets them, which waits longer for more. A request costs all processes
    much more than a record in it, and what they wait for is each other's work. If processors are
    idle, nothing is gained by that, and each record would be later.

    Records stay in order: the other producer gets none before all records of this one are durable.
    After one has failed, there is no other producer any more.
    """

    def __init__(self, settings: KafkaSettings, *, gathered: bool) -> None:
        """`gathered`: the records may wait for others. Nothing else waits for them."""
        super().__init__(settings, GATHER_MS if gathered else 0)
        self._crowded_ms = CROWDED_GATHER_MS if gathered else CROWDED_MS
        self._many = MANY_GATHERED if gathered else MANY
        self._settings = settings
        self._second: Sender | None = None
        self._current: Sender = self
        self._wanted: Sender = self
        self._wait = ProcessorWait()
        self._sends: Counter[str] = Counter()
        """Since the last look, by topic."""
        self._looked_at = self._change_at = monotonic()
        self._change_until = inf

    async def close(self) -> None:
        """See Sender."""
        self._wait.close()
        closing = [super().close()]
        if self._second is not None:
            closing.append(self._second.close())
        await asyncio.gather(*closing)

    def collect(self) -> None:
        """See Sender."""
        super().collect()
        if self._second is not None:
            self._second.collect()

    def _produce(self, record: Outgoing, future: asyncio.Future[Position]) -> bool:
        if (now_s := monotonic()) >= self._looked_at + LOOK_S:
            self._look(now_s)
        if self._wanted is not self._current and not self._change(now_s):
            return False
        if self._current is self:
            taken = super()._produce(record, future)
        else:
            taken = self._current._produce(record, future)
        self._sends[record.topic] += taken
        return taken

    def _look(self, now_s: float) -> None:
        """Decides which producer should get records until the next look."""
        most = max(self._sends.values(), default=0)
        many = most > self._many * (now_s - self._looked_at)
        crowded = self._wait.share() > SCARCE and many
        self._sends.clear()
        self._looked_at = now_s
        if crowded and self._second is None and now_s >= self._change_at:
            self._connect_second(now_s)
        wanted: Sender = self
        if crowded and self._second is not None and self._second._broken is None:
            wanted = self._second
        if wanted is not self._wanted and now_s >= self._change_at:
            self._wanted, self._change_until = wanted, now_s + CHANGE_S

    def _connect_second(self, now_s: float) -> None:
        try:
            self._second = Sender(self._settings, self._crowded_ms)
            self._change_at = now_s + CONNECT_S
        except (HeadraceError, RuntimeError) as error:  # a limit, for example of threads
            logger.warning("records are sent without waiting for more: %s", error)
            self._change_at = inf

    def _change(self, now_s: float) -> bool:
        """Changes producers, if the current one has nothing left. False: send nothing yet."""
        self._current.collect()
        if self._current.uncertain:
            self._wanted, self._change_at = self._current, inf
        elif not self._current.under_way:
            self._current = self._wanted
        elif now_s > self._change_until:
            self._wanted, self._change_at = self._current, now_s + REST_S
        else:
            return False
        return True
