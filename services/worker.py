"""Hosts shards: what every stateless worker does about partitions, so that no handler has to.

A worker shares its main topics with the other members of its consumer group. All state of one
main partition is one shard: made on assignment, dropped on revocation, rebuilt by reading. A
shard may have companions: partitions that its owner reads by itself, such as the answers to what
it asked.

Take-over has two phases. First the main partition is read from the group's commit, and the
companions from the positions noted beside it, to the ends seen at assignment; nothing is sent.
Then `on_caught_up` says that the shard knows all that its predecessor knew, and may send.

The commit of a partition is its oldest record that is not done, with the companions' positions
*as they stood when that record was first read*: what it caused lies after them. A record is done
when its handler has returned, unless the shard holds it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from prometheus_client import Counter, Gauge

from schemas.events import Event, Ref
from services.errors import HeadraceError
from services.kafka.broker import (
    METADATA_LIMIT,
    Committed,
    End,
    FencedWriter,
    Partition,
    Record,
    Subscription,
)
from services.log import Delivery, EventLog, handling, reached, resolve_starts

logger = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 1.0
INTAKE = 1_000
"""Most records of one shard that are read and not yet handled."""
CLOSE_S = 3.0
"""Seconds that a shard has to close, and as many again for what it is sending."""

HANDLED = Counter("headrace_events_handled_total", "Events handled.", ["topic"])
OPEN = Gauge("headrace_records_open", "Main records read and not done.", ["topic"])
SHARDS = Gauge("headrace_shards", "Partitions held.", ["topic"])

CompanionStart = Literal["committed", "first", "tail"]
Companions = Callable[[Partition], Mapping[Partition, CompanionStart]]


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


@dataclass(eq=False, slots=True)
class _Open:
    """A main record that may not be done, and where its companions stood."""

    offset: int
    positions: Mapping[Partition, int]
    holds: int = 1


class ShardContext:
    """A shard's hands: sending, spawning and holding, cut off when its partition is lost."""

    def __init__(self, worker: Worker, partition: Partition, writer: FencedWriter | None) -> None:
        self.partition = partition
        self.caught_up = False
        self._worker = worker
        self._writer = writer
        self._open = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._entries: dict[int, _Open] = {}

    async def send(self, event: Event) -> Ref:
        """Writes an event; durable when it returns. ShardClosed once the partition is lost."""
        if self._writer is not None:
            return (await self.send_all([event]))[0]
        self._begin()
        try:
            return await self._worker.log.send(event)
        finally:
            self._finish()

    async def send_all(self, events: Sequence[Event]) -> list[Ref]:
        """Writes events: in one transaction where the worker is a sole writer."""
        self._begin()
        try:
            if self._writer is not None:
                return await self._worker.log.send_all(self._writer, events)
            return list(await asyncio.gather(*map(self._worker.log.send, events)))
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
        entry = self._entries[delivery.offset]
        entry.holds += 1
        released = False

        def release() -> None:
            nonlocal released
            if self._open and not released:
                released = True
                entry.holds -= 1

        return release

    async def pause(self) -> None:
        """Holds the main partition back: what was fetched may still come, companions flow on."""
        await self._worker.pause(self.partition)

    async def resume(self) -> None:
        """Lets the main partition flow again."""
        await self._worker.resume(self.partition)

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
            self._worker.fail(error)

    async def _close(self, *, lost: bool) -> None:
        """Refuses what comes, cancels what runs, waits (bounded) for what is under way."""
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


@dataclass(eq=False)
class _Host:
    """One shard, its intake, and its place in the log."""

    worker: Worker
    context: ShardContext
    shard: Shard
    next_offset: int
    positions: dict[Partition, int]
    """Where each `committed` companion is read and handled up to."""
    behind: dict[Partition, int]
    """Partitions not yet read to the end seen at assignment."""
    companions: Sequence[Partition]
    intake: asyncio.Queue[Record | End] = field(
        default_factory=lambda: asyncio.Queue(maxsize=INTAKE)
    )
    open: deque[_Open] = field(default_factory=deque)
    committed: Committed | None = None
    pump: asyncio.Task[None] | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self._noted: Mapping[Partition, int] = dict(self.positions)
        places = (self.context.partition, *self.companions)
        self._handled = {place: HANDLED.labels(place.topic) for place in places}

    async def run(self) -> None:
        """Handles what arrives, in order, for as long as the partition is held."""
        await self._maybe_caught_up()
        while True:
            item = await self.intake.get()
            if isinstance(item, Record):
                await self._on_record(item)
            self._moved(item)
            if self.behind and reached(item, self.behind):
                await self._maybe_caught_up()

    async def _maybe_caught_up(self) -> None:
        if not self.behind and not self.context.caught_up:
            self.context.caught_up = True
            await self.shard.on_caught_up()

    async def _on_record(self, record: Record) -> None:
        entry: _Open | None = None
        if record.partition == self.context.partition:
            entry = _Open(record.offset, self._noted)
            self.open.append(entry)
            self.context._entries[record.offset] = entry
        delivery = await self.worker.log.decode_or_dead_letter(record)
        if delivery is not None:
            handling(delivery)
            await self.shard.on_event(delivery)
            self._handled[record.partition].inc()
        if entry is not None:
            entry.holds -= 1

    def _moved(self, item: Record | End) -> None:
        """Notes how far a partition is handled. Catching up, the committed positions stay noted."""
        position = item.offset + 1 if isinstance(item, Record) else item.offset
        if item.partition == self.context.partition:
            self.next_offset = max(self.next_offset, position)
        elif item.partition in self.positions and position > self.positions[item.partition]:
            self.positions[item.partition] = position
            if self.context.caught_up:
                self._noted = dict(self.positions)

    def place(self) -> Committed:
        """What to commit: the oldest record that is not done, or the next one."""
        while self.open and not self.open[0].holds:
            self.context._entries.pop(self.open.popleft().offset)
        if self.open:
            return Committed(self.open[0].offset, _note(self.open[0].positions))
        positions = self.positions if self.context.caught_up else self._noted
        return Committed(self.next_offset, _note(positions))

    async def close(self, *, lost: bool) -> None:
        """Ends the shard, bounded. What was read and not handled is read by the next owner."""
        self.closed = True
        if lost:
            self.context._open = False
        try:
            async with asyncio.timeout(CLOSE_S):
                if self.pump is not None:
                    self.pump.cancel()
                    await asyncio.wait([self.pump])
                await self.shard.aclose()
        except TimeoutError:
            logger.warning("shard %s did not close in %s s", self.context.partition, CLOSE_S)
        while not self.intake.empty():
            self.intake.get_nowait()
        await self.context._close(lost=lost)


def _note(positions: Mapping[Partition, int]) -> str:
    """The companions' positions as commit metadata: offsets in the order of their partitions."""
    text = json.dumps([positions[place] for place in sorted(positions)], separators=(",", ":"))
    if len(text) > METADATA_LIMIT:
        raise HeadraceError(
            f"the positions of {len(positions)} partitions take {len(text)} bytes of commit "
            f"metadata, more than the {METADATA_LIMIT} that a broker takes: use fewer partitions"
        )
    return text


def _read_note(metadata: str, places: Sequence[Partition]) -> dict[Partition, int] | None:
    """The positions noted beside a commit; None where nothing is noted."""
    if not metadata:
        return None
    offsets = json.loads(metadata)
    if len(offsets) != len(places):
        raise HeadraceError(
            f"a commit notes {len(offsets)} companion positions where {len(places)} are read: "
            f"it was made with another recipe or number of partitions"
        )
    return dict(zip(sorted(places), offsets, strict=True))


def _no_companions(_: Partition) -> Mapping[Partition, CompanionStart]:
    return {}


class Worker:
    """A member of a consumer group that hosts one shard for each partition it is given."""

    def __init__(
        self,
        log: EventLog,
        *,
        topics: Sequence[str],
        consumer_group: str,
        make_shard: Callable[[ShardContext], Shard],
        stopping: asyncio.Event,
        companions: Companions = _no_companions,
        fenced: str | None = None,
        companions_first: bool = False,
    ) -> None:
        """`fenced` names the sole writer that a shard's sends go through; None sends plainly.

        With `companions_first` a shard is caught up once its companions are, wherever its main
        partition stands: for a main topic of which only the beginning is wanted in memory.
        """
        self.log = log
        self._topics = tuple(topics)
        self._consumer_group = consumer_group
        self._make_shard = make_shard
        self._companions = companions
        self._fenced = fenced
        self._companions_first = companions_first
        self._stopping = stopping
        self._hosts: dict[Partition, _Host] = {}
        self._readers: dict[Partition, _Host] = {}
        self._failed: asyncio.Future[None] | None = None
        self._subscription: Subscription | None = None
        self._reader = log.broker.reader()

    async def run(self) -> None:
        """Works until `stopping` is set; then drains, commits and leaves the group.

        Raises what a handler or spawned task raised; DependencyError where the log is gone.
        """
        self._failed = asyncio.get_running_loop().create_future()
        self._subscription = self.log.broker.subscribe(
            self._topics, self._consumer_group, self._on_assigned, self._on_revoked
        )
        running = [
            asyncio.create_task(self._intake(self._subscription.read, self._hosts), name="main"),
            asyncio.create_task(self._intake(self._reader.read, self._readers), name="companions"),
            asyncio.create_task(self._commit_regularly(), name="commits"),
        ]
        stop = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            waiting: set[asyncio.Future[Any]] = {*running, stop, self._failed}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for finished in done:
                finished.result()
        finally:
            for task in (*running[1:], stop):
                task.cancel()
            try:
                await self._subscription.close()
            finally:
                running[0].cancel()
                await self._reader.close()
                await asyncio.gather(*running, stop, return_exceptions=True)
                if not self._failed.done():
                    self._failed.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the worker with this error; the first one counts."""
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)

    async def pause(self, partition: Partition) -> None:
        """Holds a main partition back."""
        assert self._subscription is not None
        await self._subscription.pause([partition])

    async def resume(self, partition: Partition) -> None:
        """Lets a main partition flow again."""
        assert self._subscription is not None
        await self._subscription.resume([partition])

    async def _intake(
        self,
        read: Callable[[], Coroutine[Any, Any, list[Record | End]]],
        hosts: Mapping[Partition, _Host],
    ) -> None:
        while True:
            items = await read()
            # Whose they are is settled now: a partition that comes back while this waits for room
            # is read anew from its commit, and must not get what its former shard had fetched.
            owners = {item.partition: hosts.get(item.partition) for item in items}
            for item in items:
                host = owners[item.partition]
                if host is not None and not host.closed:
                    await host.intake.put(item)

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            places = {}
            for partition, host in self._hosts.items():
                place = host.place()
                OPEN.labels(partition.topic).set(len(host.open))
                if place != host.committed:
                    places[partition] = place
            if places:
                assert self._subscription is not None
                await self._subscription.commit(places)
                for partition, place in places.items():
                    if (held := self._hosts.get(partition)) is not None:
                        held.committed = place

    async def _on_assigned(self, places: Mapping[Partition, Committed]) -> None:
        for partition, committed in places.items():
            await self._take_over(partition, committed)

    async def _take_over(self, partition: Partition, committed: Committed) -> None:
        broker = self.log.broker
        writer = await broker.fenced(self._fenced) if self._fenced else None
        starts = self._companions(partition)
        noted = [place for place, start in starts.items() if start == "committed"]
        positions = _read_note(committed.metadata, noted) or dict.fromkeys(noted, 0)
        resolved, ends = await resolve_starts(
            broker,
            {
                place: positions[place] if start == "committed" else start
                for place, start in starts.items()
            }
            | {partition: committed.offset},
        )
        behind = {place: end for place, end in ends.items() if resolved[place] < end}
        if self._companions_first:
            behind.pop(partition, None)
        logger.info("take over %s/%d from %d", partition.topic, partition.number, committed.offset)
        context = ShardContext(self, partition, writer)
        shard = self._make_shard(context)
        companions = list(starts)
        host = _Host(self, context, shard, committed.offset, positions, behind, companions)
        self._hosts[partition] = host
        self._readers |= dict.fromkeys(companions, host)
        SHARDS.labels(partition.topic).inc()
        if companions:
            await self._reader.assign({place: resolved[place] for place in companions})
        host.pump = asyncio.create_task(host.run(), name=f"shard {partition.number}")
        host.pump.add_done_callback(self._on_pump_done)

    def _on_pump_done(self, pump: asyncio.Task[None]) -> None:
        if not pump.cancelled() and (error := pump.exception()) is not None:
            self.fail(error)

    async def _on_revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        hosts = [self._hosts.pop(place) for place in partitions if place in self._hosts]
        await asyncio.gather(*(self._release(host, lost) for host in hosts))
        return {} if lost else {host.context.partition: host.place() for host in hosts}

    async def _release(self, host: _Host, lost: bool) -> None:
        if host.companions:
            await self._reader.unassign(host.companions)
        await host.close(lost=lost)
        for place in host.companions:
            del self._readers[place]
        if host.context._writer is not None:
            await host.context._writer.close()
        SHARDS.labels(host.context.partition.topic).dec()
        logger.info("released %s/%d", host.context.partition.topic, host.context.partition.number)
