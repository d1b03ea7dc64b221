"""A thread that polls one consumer, and hands the items to the asyncio loop.

The hand-over is bounded in bytes. If the loop does not keep up, the thread first waits for a
moment, since a full hand-over soon has room again. Then it pauses the partitions and keeps polling,
so that the member stays in its group and its partitions can be revoked.

Only that thread calls the consumer: confluent-kafka lets in one thread at a time, and a polling
thread rarely releases it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from confluent_kafka import KafkaError, Message, TopicPartition

from headrace.errors import DependencyError
from headrace.services.base.lag import Lag
from headrace.services.kafka.broker import End, Partition, Record, records_lost
from headrace.services.kafka.client_settings import Properties
from headrace.services.kafka.client_settings import logger as client_logger
from headrace.services.kafka.convert import (
    RECORD_WEIGHT,
    find_leaders,
    lag_of,
    location,
    make_consumer,
    to_record,
    topic_partitions,
    watermarks,
    weight,
)
from headrace.services.kafka.failures import FINAL, as_failure, failure

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""Commands to the thread wait up to this long if no message arrives."""
QUIET_POLL_S, QUIET_S = 0.1, 2.0
"""They may wait longer if there was none for some time: each look for one costs CPU."""
BATCH = 500
HANDED_OVER = 8 * 1024 * 1024
"""The most bytes of records that were read and that the loop has not taken yet."""
ROOM_S = 0.1
LAG_EVERY_S = 2.0
"""Seconds between two measurements of the lag."""
CLOSE_S = 10.0
"""The limit for the last revocation and commit, and for leaving the group."""


R = TypeVar("R")
_Command = tuple[Callable[[], Any], asyncio.Future[Any]]


class Poller:
    """A consumer in a thread. Call public methods on the loop, unless they say otherwise."""

    final = FINAL
    """Codes of errors that end the polling."""

    def __init__(
        self, properties: Properties, name: str, on_arrival: Callable[[], None], who: str = ""
    ) -> None:
        """`on_arrival` is called on the loop before new items are kept for `read`.

        `who` names the reader in the error for records that are gone.
        """
        self._loop = asyncio.get_running_loop()
        self._who = who
        self._on_arrival = on_arrival
        self.consumer = make_consumer(properties)
        self.held: frozenset[Partition] = frozenset()
        """The partitions whose items `read` may return. Set on the loop only."""
        self.failure: Exception | None = None
        self.stopping = threading.Event()
        self._paused: frozenset[Partition] = frozenset()
        self._items: list[Record | End] = []
        self._arrived = asyncio.Event()
        self._handed = 0
        self._taken = 0
        self._room = threading.Event()
        self._throttled = False
        self._commands: SimpleQueue[_Command | None] = SimpleQueue()
        self._lag = Lag()
        self._lag_due = 0.0
        self._quiet_at = monotonic() + QUIET_S
        self._reached: dict[Partition, int] = {}
        """How far each partition was read. Only the thread uses it."""
        self._new: set[str] = set()
        """Topics that were assigned, and whose leaders may be unknown."""
        self._closed = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=f"kafka-{name}", daemon=True)

    def start(self) -> None:
        """Starts to poll."""
        self._thread.start()

    async def read(self) -> list[Record | End]:
        """Waits for at least one item, and returns all. Raises the error that ended the polling."""
        while not self._items:
            if self.failure is not None:
                raise self.failure
            self._arrived.clear()
            await self._arrived.wait()
        items, self._items = self._items, []
        self._take(items)
        return items

    def hold(self, partitions: Iterable[Partition]) -> None:
        """Lets `read` return items of these partitions from now on."""
        self.held |= frozenset(partitions)

    def drop(self, partitions: Iterable[Partition]) -> None:
        """Keeps `read` from returning items of these partitions from now on."""
        self.held -= frozenset(partitions)
        self._paused &= self.held
        items, self._items = self._items, []
        self._keep(items)

    async def pause(self, partitions: Iterable[Partition]) -> None:
        """Stops fetching until `resume`. May be called before the assignment."""
        self._paused |= frozenset(partitions)
        await self.run(lambda: self.consumer.pause(topic_partitions(self._paused & self.held)))

    async def resume(self, partitions: Iterable[Partition]) -> None:
        """Fetches again; if the hand-over is full, as soon as it has room."""
        resumed = self._paused.intersection(partitions)
        self._paused -= resumed

        def work() -> None:
            if not self._throttled:
                self.consumer.resume(topic_partitions(resumed & self.held))

        await self.run(work)

    async def run(self, work: Callable[[], R]) -> R:
        """Runs `work` in the thread, after it has handed over all that it fetched before."""
        if self.failure is not None:
            raise self.failure
        done: asyncio.Future[R] = self._loop.create_future()
        self._commands.put((work, done))
        return await done

    def assign(self, positions: Mapping[Partition, int]) -> None:
        """In the thread: starts to fetch partitions, each from its offset."""
        self._reached |= positions
        self.consumer.incremental_assign(
            [TopicPartition(at.topic, at.number, offset) for at, offset in positions.items()]
        )
        self._new |= {at.topic for at in positions}
        waiting = positions.keys() if self._throttled else self._paused & positions.keys()
        if waiting:
            self.consumer.pause(topic_partitions(waiting))

    def unassign(self, partitions: Iterable[Partition]) -> None:
        """In the thread: stops fetching partitions."""
        partitions = list(partitions)
        for partition in partitions:
            self._reached.pop(partition, None)
        gone = topic_partitions(partitions)
        self.consumer.resume(gone)  # Otherwise a later assignment of them would start paused.
        self.consumer.incremental_unassign(gone)

    def wait(self, work: Coroutine[Any, Any, R], limit_s: float, what: str) -> R:
        """In the thread: waits for a coroutine on the loop, bounded, and serves commands meanwhile.

        `what` names the coroutine's work in errors.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise DependencyError(f"{what} failed: the event loop has ended") from None
        future.add_done_callback(lambda _: self._commands.put(None))
        deadline = monotonic() + limit_s
        while not future.done():
            try:
                command = self._commands.get(timeout=max(0.0, deadline - monotonic()))
            except Empty:
                future.cancel()
                raise DependencyError(f"{what} took more than {limit_s:g} s") from None
            self._serve(command)
        return future.result()

    async def close(self) -> None:
        """Ends the thread, which closes the consumer. A waiting `read` raises DependencyError."""
        self.stopping.set()
        self._room.set()
        done, _ = await asyncio.wait({self._closed}, timeout=CLOSE_S)
        if done:
            # The thread reports as its last act, but on a busy machine it may not have ended yet.
            await asyncio.to_thread(self._thread.join, CLOSE_S)
        else:
            logger.warning(
                "%s did not close in %.0f s; it goes on alone", self._thread.name, CLOSE_S
            )
        self.fail(DependencyError(f"{self._thread.name} is closed and reads no more"))

    def fail(self, error: Exception) -> None:
        """Ends the reading: `read` returns what has arrived, then raises the first error."""
        if self.failure is None:
            self.failure = error
        self._arrived.set()
        with suppress(Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None:
                    _settle(command[1], None, self.failure)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """From the thread: calls a function on the loop. Ends the thread if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self.stopping.set()

    def _take(self, items: Iterable[Record | End]) -> None:
        self._taken += sum(map(_weight, items))
        if self._handed - self._taken < HANDED_OVER // 2:
            self._room.set()

    def _run(self) -> None:
        try:
            with as_failure("can't continue to read"):
                while not self.stopping.is_set():
                    self._serve_all()
                    find_leaders(self.consumer, self._new)
                    if self._has_room():
                        self._poll()
                    self._measure_lag()
        except Exception as error:  # Any error, also a callback's, must reach the reader.
            self.call(self.fail, error)
        self._lag.show({})
        # After a failure too, the member stays silent until it is closed and leaves its group.
        self.stopping.wait()
        try:
            self.consumer.close()
        except Exception:
            logger.exception("can't close %s cleanly", self._thread.name)
        self.call(_settle, self._closed, None, None)

    def _serve_all(self) -> None:
        with suppress(Empty):
            while True:
                self._serve(self._commands.get_nowait())

    def _serve(self, command: _Command | None) -> None:
        if command is None:
            return
        work, done = command
        self._quiet_at = monotonic() + QUIET_S
        try:
            with as_failure("a consumer command failed"):
                self.call(_settle, done, work(), None)
        except Exception as error:  # The caller of `run` must get it.
            self.call(_settle, done, None, error)

    def _has_room(self) -> bool:
        """Waits a moment for room. If there is none, pauses all partitions; polling goes on."""
        if self._handed - self._taken < HANDED_OVER:
            if self._throttled:
                self._throttled = False
                self.consumer.resume(topic_partitions(self.held - self._paused))
            return True
        if self._throttled:
            return True
        self._room.clear()
        if self._handed - self._taken >= HANDED_OVER and not self._room.wait(ROOM_S):
            self._throttled = True
            self.consumer.pause(topic_partitions(self.held))
        return False

    def _poll(self) -> None:
        message = self.consumer.poll(POLL_S if monotonic() < self._quiet_at else QUIET_POLL_S)
        if message is None:
            return
        # poll() waits for one message; consume() takes the others that have arrived.
        messages = [message, *self.consumer.consume(BATCH - 1, 0)]
        items: list[Record | End] = []
        try:
            for message in messages:
                item = self._item(message)
                if item is not None:
                    items.append(item)
                    after = item.offset + 1 if isinstance(item, Record) else item.offset
                    self._reached[item.partition] = after
        finally:
            self._handed += sum(map(_weight, items))
            self.call(self._keep, items)

    def _measure_lag(self) -> None:
        """Compares what was read with the ends that the last fetches have shown."""
        now_s = monotonic()
        if now_s < self._lag_due:
            return
        self._lag_due = now_s + LAG_EVERY_S
        self._lag.show(lag_of(self.consumer, self._reached))

    def _keep(self, items: list[Record | End]) -> None:
        """On the loop: keeps the items of held partitions for `read`, and drops the others."""
        self._on_arrival()
        kept = [item for item in items if item.partition in self.held]
        if len(kept) < len(items):
            self._take([item for item in items if item.partition not in self.held])
        if kept:
            self._items += kept
            self._arrived.set()

    def _item(self, message: Message) -> Record | End | None:
        """The item in a message, or None if it is an error that needs only a line in the log."""
        error = message.error()
        if error is None:
            return to_record(message)
        if error.code() == KafkaError._PARTITION_EOF:
            return End(*location(message))
        self._on_error(error, message.topic(), message.partition(), message.offset())
        return None

    def _on_error(
        self, error: KafkaError, topic: str | None, number: int | None, offset: int | None
    ) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET and topic and number is not None:
            partition = Partition(topic, number)
            wanted = offset if offset is not None and offset >= 0 else None
            raise records_lost(partition, wanted, watermarks(self.consumer, partition), self._who)
        if error.fatal() or error.code() in self.final:
            raise failure(f"can't read {topic or self._who}", error)
        if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
            client_logger.warning("%s: %s", topic or "consumer", error.str())


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def _weight(item: Record | End) -> int:
    return RECORD_WEIGHT if isinstance(item, End) else weight(item)
