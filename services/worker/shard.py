"""A shard is all state of one partition. A ShardContext is what it may do with the log.

A shard is made on assignment, dropped on revocation, and rebuilt by reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Protocol

from headrace.schemas.events import Event, Ref
from headrace.services.kafka.broker import FencedWriter, Partition, Subscription
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.worker.open_records import HeldPositions, OpenRecords

CLOSE_S = 3.0
"""Seconds that a shard may take to close, and again for the sends that are under way."""


class ShardClosed(asyncio.CancelledError):
    """The shard's partition was revoked. Code that tries to send ends as if it were cancelled."""


class Shard(Protocol):
    """All state of one partition."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handles one event. Events come one at a time, in offset order within a partition.

        A handler that waits slows the shard's intake down. Spawn long work instead.
        """

    async def on_caught_up(self) -> None:
        """The shard knows all that its predecessor knew: from now on it may send."""

    async def aclose(self) -> None:
        """Sends what must still be sent, in bounded time. Nothing can be sent after it returns."""


@dataclass(eq=False)
class ShardContext:
    """What a shard may do: send, spawn and hold. All of it ends when its partition is revoked."""

    log: EventLog
    subscription: Subscription
    fail: Callable[[BaseException], None]
    """Ends the worker with an error."""
    partition: Partition
    begins_at: int
    """Offset of the main record that is read first. All records before it are done."""
    writer: FencedWriter | None = None
    """The shard sends through it if it belongs to a sole writer."""
    deaths: int = 0
    """How many owners before this one died, one after the other, with records open that are still
    open. 0 if the worker does not count deaths."""
    done_below: int = 0
    """Records before this offset are done, but for those that are held for long."""

    def __post_init__(self) -> None:
        self.open_records = OpenRecords()
        """For the host. A shard uses `hold`."""
        self.caught_up = False
        self.held_positions = HeldPositions()
        """For the host. A shard uses `hold_positions`."""
        self.writing = False
        """Whether a transaction of the sole writer is under way."""
        self._turn = asyncio.Lock()
        self.on_written: Callable[[Sequence[Ref]], None] = lambda _: None
        """For the host: takes the records that the sole writer has written."""
        self._open = True
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def send(self, event: Event, partition: int | None = None) -> Ref:
        """Writes an event. It is durable on return. Raises ShardClosed after a revocation.

        If `partition` is None, the event's key decides.
        """
        if self.writer is not None:
            return (await self.send_all([event]))[0]
        with self._under_way():
            return await self.log.send(event, partition)

    async def send_all(self, events: Sequence[Event]) -> list[Ref]:
        """Writes events in one transaction. Only the shard of a sole writer may do this."""
        assert self.writer is not None
        async with self._turn:  # Positions are noted only between two transactions.
            self.writing = True
            try:
                with self._under_way():
                    refs = await self.log.send_all(self.writer, events)
            finally:
                self.writing = False
            self.on_written(refs)
            return refs

    def spawn(
        self, work: Coroutine[Any, Any, Any], name: str, trace: Context | None = None
    ) -> asyncio.Task[Any]:
        """Runs a coroutine that is cancelled with the shard. Its error ends the worker.

        It runs in the context `trace`, or in a copy of the caller's.
        """
        task = asyncio.create_task(work, name=name, context=trace)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    @property
    def is_open(self) -> bool:
        """Whether the shard may still send."""
        return self._open

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Has a task cancelled with the shard. Whoever started it takes its error."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hold(self, delivery: Delivery[Event], *, long: bool = False) -> Callable[[], None]:
        """Keeps a main record open until the returned function is called.

        The function does nothing after a revocation: the next owner reads the record again. With
        `long`, the next owner learns which of the records after it are done (`done_below`).
        """
        release = self.open_records.hold(delivery.offset, long=long)

        def release_if_open() -> None:
            if self._open:
                release()

        return release_if_open

    def hold_positions(self) -> Callable[[], None]:
        """Keeps the commit from passing the side partitions' positions as of now.

        It ends when the returned function is called. While the shard catches up, these are the
        positions at the assignment. Of a partition that the shard itself writes, as the sole
        writer, the position is behind all that it has written.
        """
        return self.held_positions.hold()

    async def pause(self) -> None:
        """Pauses the main partition. Records that were fetched may still come."""
        await self.subscription.pause([self.partition])

    async def resume(self) -> None:
        """Resumes the main partition."""
        await self.subscription.resume([self.partition])

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """Surrounds a send, so that `close` can wait for it."""
        if not self._open:
            raise ShardClosed
        assert self.caught_up, "a shard sends nothing while it catches up"
        self._sending += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._sending -= 1
            if not self._sending:
                self._idle.set()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def cut(self) -> None:
        """Refuses to send from now on. Only the host calls it, when the partition was lost."""
        self._open = False

    async def close(self, *, lost: bool) -> None:
        """Cancels tasks, waits in bounded time for sends under way, and refuses new ones.

        Only the host calls it. It closes the sole writer, too.
        """
        self._open = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if tasks:
                    await asyncio.wait(tasks)
                if not lost:
                    await self._idle.wait()
        if self.writer is not None:
            await self.writer.close()
