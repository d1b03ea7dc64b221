"""A shard is all state of one partition. A ShardContext is what it may do with the log.

A shard is made on assignment, dropped on revocation, and rebuilt by reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from headrace.schemas.events import Event, Ref
from headrace.services.kafka.broker import FencedWriter, Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.worker.open_records import OpenRecords

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


class ShardHome(Protocol):
    """What a ShardContext needs of the worker that hosts the shard."""

    log: EventLog

    async def pause(self, partition: Partition) -> None:
        """Stops fetching from the shard's partition until `resume`."""

    async def resume(self, partition: Partition) -> None:
        """Fetches from the shard's partition again."""

    def fail(self, error: BaseException) -> None:
        """Ends the worker with this error."""


class ShardContext:
    """What a shard may do: send, spawn and hold. All of it ends when its partition is revoked."""

    def __init__(
        self,
        home: ShardHome,
        partition: Partition,
        open_records: OpenRecords,
        writer: FencedWriter | None,
        deaths: int = 0,
    ) -> None:
        self.partition = partition
        self.deaths = deaths
        """How many owners before this one died, one after the other, with records open that are
        still open. 0 if the worker does not count deaths."""
        self.caught_up = False
        self.begins_at = 0
        """Offset of the main record that is read first. All records before it are done."""
        self.begun_below = 0
        """An earlier owner may have acted on the main records before this offset, although this
        owner reads them only after it has caught up. What they caused lies behind the positions
        that this owner started at. If side partitions come first, the shard sets this at the
        start of `on_caught_up`."""
        self._home = home
        self._open_records = open_records
        self._writer = writer
        self._open = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def send(self, event: Event) -> Ref:
        """Writes an event. It is durable on return. Raises ShardClosed after a revocation."""
        if self._writer is not None:
            return (await self.send_all([event]))[0]
        self._begin()
        try:
            return await self._home.log.send(event)
        finally:
            self._finish()

    async def send_all(self, events: Sequence[Event]) -> list[Ref]:
        """Writes events; a sole writer writes them in one transaction."""
        self._begin()
        try:
            if self._writer is not None:
                return await self._home.log.send_all(self._writer, events)
            return list(await asyncio.gather(*map(self._home.log.send, events)))
        finally:
            self._finish()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs a coroutine that is cancelled with the shard. Its error ends the worker."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def hold(self, delivery: Delivery[Event]) -> Callable[[], None]:
        """Keeps a main record open until the returned function is called.

        The function does nothing after a revocation: the next owner reads the record again.
        """
        release = self._open_records.hold(delivery.offset)

        def release_if_open() -> None:
            if self._open:
                release()

        return release_if_open

    async def pause(self) -> None:
        """Pauses the main partition. Records that were fetched may still come."""
        await self._home.pause(self.partition)

    async def resume(self) -> None:
        """Resumes the main partition."""
        await self._home.resume(self.partition)

    def _begin(self) -> None:
        if not self._open:
            raise ShardClosed
        assert self.caught_up, "a shard sends nothing while it catches up"
        self._sending += 1
        self._idle.clear()

    def _finish(self) -> None:
        self._sending -= 1
        if not self._sending:
            self._idle.set()

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._home.fail(error)

    def cut(self) -> None:
        """Refuses to send from now on. Only the host calls it, when the partition was lost."""
        self._open = False

    async def close(self, *, lost: bool) -> None:
        """Refuses new sends, cancels tasks, and waits in bounded time for sends under way.

        Only the host calls it.
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
