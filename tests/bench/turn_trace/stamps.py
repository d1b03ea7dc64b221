"""Notes when a process sends and reads each record of a turn. The product's code stays as it is.

`install` wraps the functions that a record passes, in a service's process, before the service
starts. All processes of a machine share the clock. The stamps stay in memory and are written when
the process ends.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic_ns
from typing import Any

from headrace.schemas.events import Event
from headrace.services.kafka import poller, producer
from headrace.services.kafka.broker import End, Headers, Outgoing, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.worker.shard_host import ShardHost

KINDS = ("GenerationRequested", "GenerationCompleted", "ActionRequested", "ObservationRecorded")
"""The four records of a turn, in their order."""
LIMIT = 5_000_000
"""Stamps that a process keeps at most. Later ones are dropped."""

Stamp = tuple[str, str, str, int]
"""The point, the event's type, the event's id, nanoseconds of the machine's monotonic clock."""


class StampBook:
    """The stamps of one process. Any thread may add some."""

    def __init__(self) -> None:
        self.stamps: list[Stamp] = []

    def add(self, point: str, headers: Headers, at_ns: int | None = None) -> None:
        """Notes that a record passed a point, now or at a given time."""
        found = dict(headers)
        kind = found.get("ce_type", b"").decode().removeprefix("headrace.")
        if kind in KINDS and len(self.stamps) < LIMIT:
            name = found["ce_id"].decode()
            self.stamps.append((point, kind, name, monotonic_ns() if at_ns is None else at_ns))

    def write(self, path: Path) -> None:
        """Writes one stamp a line, as JSON."""
        with path.open("w") as file:
            file.writelines(f"{json.dumps(stamp)}\n" for stamp in self.stamps)


class StampedConsumer:
    """A consumer that notes when its last `poll` returned."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.polled_ns = 0

    def __getattr__(self, name: str) -> Any:
        """All else is the consumer's."""
        return getattr(self._made, name)

    def poll(self, timeout: float) -> Any:
        """Polls as the consumer does."""
        message = self._made.poll(timeout)
        self.polled_ns = monotonic_ns()
        return message


def install(path: Path) -> None:
    """Stamps all that this process sends and reads. Writes the stamps to `path` at its end."""
    book = StampBook()
    _stamp_sends(book)
    _stamp_reads(book)
    _name_threads()
    atexit.register(book.write, path)


def _stamp_sends(book: StampBook) -> None:
    module: Any = producer
    outgoing, produce, send = EventLog.outgoing, module.produce, producer.Sender.send

    def stamped_outgoing(self: EventLog, event: Event, partition: int | None = None) -> Outgoing:
        began_ns = monotonic_ns()
        record = outgoing(self, event, partition)
        book.add("encoding", record.headers, began_ns)
        book.add("encoded", record.headers)
        return record

    def stamped_produce(made: Any, record: Outgoing, on_delivery: Callable[..., None]) -> None:
        def stamped_delivery(error: Any, message: Any) -> None:
            book.add("acknowledged", record.headers)
            on_delivery(error, message)

        produce(made, record, stamped_delivery)
        book.add("produced", record.headers)

    async def stamped_send(self: producer.Sender, record: Outgoing) -> Any:
        position = await send(self, record)
        book.add("sent", record.headers)
        return position

    EventLog.outgoing = stamped_outgoing  # type: ignore[method-assign]
    module.produce = stamped_produce
    producer.Sender.send = stamped_send  # type: ignore[method-assign]


def _stamp_reads(book: StampBook) -> None:
    module: Any = poller
    make, to_item, keep = module.make_consumer, poller.Poller._item, poller.Poller._keep
    on_record, decode = ShardHost._on_record, EventLog.decode

    def stamped_item(self: Any, message: Any) -> Record | End | None:
        item = to_item(self, message)
        if isinstance(item, Record):
            book.add("fetched", item.headers, self.consumer.polled_ns)
        return item

    def stamped_keep(self: Any, items: Iterable[Record | End]) -> None:
        now_ns, items = monotonic_ns(), list(items)
        keep(self, items)
        for item in items:
            if isinstance(item, Record):
                book.add("on loop", item.headers, now_ns)

    async def stamped_on_record(self: ShardHost, record: Record) -> None:
        book.add("taken", record.headers)
        await on_record(self, record)

    async def stamped_decode(self: EventLog, record: Record) -> Delivery[Event]:
        delivery = await decode(self, record)
        book.add("decoded", record.headers)
        return delivery

    module.make_consumer = lambda properties: StampedConsumer(make(properties))
    poller.Poller._item = stamped_item  # type: ignore[method-assign]
    poller.Poller._keep = stamped_keep  # type: ignore[method-assign]
    ShardHost._on_record = stamped_on_record  # type: ignore[method-assign]
    EventLog.decode = stamped_decode  # type: ignore[method-assign]


def _name_threads() -> None:
    """Gives Python's threads their names in /proc, which are those of librdkafka's already."""
    run = threading.Thread.run

    def named_run(self: threading.Thread) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self.name[:15])
        run(self)

    threading.Thread.run = named_run  # type: ignore[method-assign]
