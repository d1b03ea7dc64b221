"""What a handler is given: all state of one partition, and its hands on the log.

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
"""Seconds that a shard has to close, and as many again for what it is sending."""


class ShardClosed(asyncio.CancelledError):
    """The shard's partition is gone: what tried to send ends as if cancelled."""


class Shard(Protocol):
    """All state of one partition: made on assignment, dropped on revocation, rebuilt by reading."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handles an event: in offset order per partition, one at a time per shard.

        It must not wait for long work (spawn that), unless it means to slow the intake down.
        """

    async def on_caught_up(self) -> None:
        """The second phase of take-over: from here on the shard may send."""

    async def aclose(self) -> None:
        """Last words, bounded: after it nothing is sent any more."""


class ShardHome(Protocol):
    """What a shard's hands need of the worker that hosts it."""

    log: EventLog

    async def pause(self, partition: Partition) -> None: ...

    async def resume(self, partition: Partition) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class ShardContext:
    """A shard's hands: sending, spawning and holding, cut off when its partition is lost."""

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
        """Owners before this one that died one after the other, with something open that still is.
        0 where the worker doesn't count them."""
        self.caught_up = False
        self.begins_at = 0
        """The main record that is read first: all before it are done."""
        self.begun_below = 0
        """Main records before this offset an owner before may have acted on, though this one reads
        them after it has caught up: what they caused lies after the positions that it began at. For
        the shard to say as `on_caught_up` begins, where companions come first."""
        self._home = home
        self._open_records = open_records
        self._writer = writer
        self._open = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def send(self, event: Event) -> Ref:
        """Writes an event; durable when it returns. ShardClosed once the partition is lost."""
        if self._writer is not None:
            return (await self.send_all([event]))[0]
        self._begin()
        try:
            return await self._home.log.send(event)
        finally:
            self._finish()

    async def send_all(self, events: Sequence[Event]) -> list[Ref]:
        """Writes events: in one transaction where the worker is a sole writer."""
        self._begin()
        try:
            if self._writer is not None:
                return await self._home.log.send_all(self._writer, events)
            return list(await asyncio.gather(*map(self._home.log.send, events)))
        finally:
            self._finish()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs a coroutine as part of the shard: cancelled with it. Its error ends the worker."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def hold(self, delivery: Delivery[Event]) -> Callable[[], None]:
        """Keeps the commit at or before this main record until the result is called.

        A release after the partition is lost does nothing: the next owner takes the record up.
        """
        release = self._open_records.hold(delivery.offset)

        def release_if_open() -> None:
            if self._open:
                release()

        return release_if_open

    async def pause(self) -> None:
        """Holds the main partition back: what was fetched may still come, companions flow on."""
        await self._home.pause(self.partition)

    async def resume(self) -> None:
        """Lets the main partition flow again."""
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
        """The partition is lost: nothing is sent any more. Called by the host alone."""
        self._open = False

    async def close(self, *, lost: bool) -> None:
        """Refuses what comes, cancels what runs, waits (bounded) for what is under way.

        Called by the host alone.
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
