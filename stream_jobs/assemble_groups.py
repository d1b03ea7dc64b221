"""Turns ended tasks into groups: a Faust stream job, and the only module that imports Faust.

It reads `results` and writes one group for each policy that trains. It acknowledges a result when
all its groups are durable, in offset order. So a crash repeats results but never loses one, and
readers recognise a repeated group by its id. A record that is not an event goes to `dead-letters`.
More processes share the partitions as one consumer group.

Faust reads and commits. The event log writes the groups, because its producer is idempotent and
Faust's is not. The job may not notice that the broker is out of reach while nothing is in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import faust
from aiokafka import AIOKafkaConsumer, TopicPartition  # type: ignore[import-untyped]
from aiokafka.errors import IllegalStateError, KafkaError  # type: ignore[import-untyped]
from faust import streams

from headrace.errors import DependencyError, HeadraceError, UsageError
from headrace.schemas.events import GroupClosed, TaskEnded
from headrace.schemas.topics import RESULTS
from headrace.services.kafka.broker import Partition, Record, records_lost
from headrace.services.log.event_log import EventLog
from headrace.services.log.trace import enter_trace
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs.groups import GroupAssembler
from headrace.stream_jobs.metrics.job_metrics import note_group, show_lag
from headrace.stream_jobs.security.faust_credentials import faust_credentials
from headrace.stream_jobs.security.header_names import accept_any_header_names

logger = logging.getLogger(__name__)

SERVICE = "assemble-groups"
IN_FLIGHT = 64
"""The most results whose groups are being written at the same time."""
STOP_S = 8.0
"""How long Faust may take to commit and leave its consumer group."""


async def run(
    context: ServiceContext, bootstrap_servers: str, properties: Mapping[str, str] | None = None
) -> None:
    """Assembles groups until `context.stopping`.

    `bootstrap_servers` is `host:port[,host:port…]`. `properties` are librdkafka's; only those of
    TLS and SASL are used. Raises DependencyError if the broker is out of reach, UsageError for
    properties that Faust does not support, and any error that handling a result raises. Nothing is
    committed past such a result.
    """
    _require_compiled_faust()
    accept_any_header_names()
    AIOKafkaConsumer.seek_to_committed = seek_to_committed
    for name in ("faust", "mode"):
        logging.getLogger(name).setLevel(logging.WARNING)  # Below, they log each internal step.
    # It logs several errors a second while the broker is away. Errors that stay end the job anyway.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    (context.state / SERVICE).mkdir(parents=True, exist_ok=True)
    app = _make_app(context, bootstrap_servers, faust_credentials(properties or {}, SERVICE))
    job = _GroupJob(context.log, GroupAssembler(context.recipe), lambda: app.consumer_generation_id)
    results = app.topic(
        context.log.topics.name(RESULTS), key_type=bytes, value_type=bytes, allow_empty=True
    )

    show_lag(
        context.log.topics.name(RESULTS),
        job.reached,
        lambda at: app.consumer.highwater(TopicPartition(at.topic, at.number)),
    )

    @app.agent(results, concurrency=1, name=SERVICE)
    async def assemble(stream: Any) -> None:
        await job.follow(stream.noack().events())

    @app.on_partitions_revoked.connect
    async def stop_fetching(*_: Any, **__: Any) -> None:
        # Faust empties its queues before it resumes after a rebalance. It stops fetching for that
        # only if it held partitions. If it held none, for example because a topic was missing, it
        # would discard what it fetched meanwhile, and commit past it.
        app.consumer.stop_flow()

    await _require_committed_offsets(context)
    app.finalize()
    try:
        await _until_stopping(app, job, context.stopping)
    finally:
        await job.aclose()


_plain_seek_to_committed = AIOKafkaConsumer.seek_to_committed


async def seek_to_committed(consumer: Any, *partitions: TopicPartition) -> Any:
    """Seeks to offset 0, too, if that is committed. aiokafka itself does nothing then.

    Faust drops the records that arrive while a rebalance ends, and seeks back to read them again.
    Without this it would pass over them until the next rebalance, as long as nothing was committed.
    """
    committed = await _plain_seek_to_committed(consumer, *partitions)
    for partition, offset in committed.items():
        if offset == 0:
            with suppress(IllegalStateError):  # It was revoked meanwhile.
                consumer.seek(partition, 0)
    return committed


async def _require_committed_offsets(context: ServiceContext) -> None:
    """Raises RecordsLost if results were deleted before the group handled them.

    Faust would only stop without a reason.
    """
    log, group = context.log, context.consumer_group(SERVICE)
    partitions = log.topics.partitions_of(RESULTS)
    bounds = await log.broker.ends(partitions)
    for partition, committed in (await log.broker.committed(group, partitions)).items():
        if committed.offset < bounds[partition][0]:
            reader = f"the consumer group {group}"
            raise records_lost(partition, committed.offset, bounds[partition], reader)


def _make_app(context: ServiceContext, bootstrap_servers: str, credentials: Any) -> faust.App:
    return faust.App(
        id=context.consumer_group(SERVICE),
        broker=[f"kafka://{server.strip()}" for server in bootstrap_servers.split(",")],
        broker_credentials=credentials,
        datadir=context.state / SERVICE,
        autodiscover=False,
        web_enabled=False,
        key_serializer="raw",
        value_serializer="raw",
        topic_allow_declare=False,
        topic_disable_leader=True,
        stream_wait_empty=False,
        stream_buffer_maxsize=4 * IN_FLIGHT,
        consumer_auto_offset_reset="none",
        broker_commit_interval=1.0,
        broker_heartbeat_interval=1.5,
        broker_session_timeout=6.0,
        broker_rebalance_timeout=10.0,
        broker_request_timeout=20.0,
        # A broker that has just restarted may not list the topic yet. Then the group's leader
        # leaves the topic out, and looks again only after this time (five minutes by default).
        consumer_metadata_max_age_ms=3_000,
    )


class _GroupJob:
    """Handles results in order, with overlapping writes of groups, and acknowledges in order."""

    def __init__(
        self, log: EventLog, assembler: GroupAssembler, generation: Callable[[], int]
    ) -> None:
        """`generation` returns the consumer group's current generation.

        A record of an earlier generation must not be acknowledged: the acknowledgement would count
        for the current assignment, which reads the record again.
        """
        self._log = log
        self._assembler = assembler
        self._generation = generation
        self._flight: deque[tuple[faust.EventT[Any], asyncio.Future[Any]]] = deque()
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self.reached: dict[Partition, int] = {}
        """The offset of the next result to read, by partition."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Holds the first failure. After it nothing more is acknowledged."""

    async def follow(self, events: AsyncIterator[faust.EventT[Any]]) -> None:
        """Handles a stream of results. Never raises: Faust would commit past the failed result."""
        async for event in events:
            await self._room.acquire()
            try:
                delivery = await self._begin(event)
            except asyncio.CancelledError:  # Faust restarts its agents at a rebalance.
                self._room.release()
                raise
            except Exception as error:
                self._fail(error)
                await asyncio.Event().wait()  # Until the process ends: handle no later result.
            else:
                self._flight.append((event, delivery))
                delivery.add_done_callback(self._settle)

    async def _begin(self, event: faust.EventT[Any]) -> asyncio.Future[Any]:
        """Returns a future that is done when the result's groups are durable."""
        delivery = await self._log.decode_or_dead_letter(_record(event.message))
        if delivery is None:
            return asyncio.gather()
        assert isinstance(delivery.event, TaskEnded)
        self.reached[delivery.partition] = delivery.offset + 1
        enter_trace(delivery.traceparent)
        groups = self._assembler.on_task(delivery.event, round(delivery.recorded_at * 1000))
        return asyncio.ensure_future(self._write(groups))

    async def _write(self, groups: Sequence[GroupClosed]) -> None:
        for group in groups:
            await self._log.send(group)
            note_group(group)

    def _settle(self, _: asyncio.Future[None]) -> None:
        """Acknowledges results whose groups are durable, in the order of the results."""
        while self._flight and self._flight[0][1].done() and not self.failed.done():
            event, delivery = self._flight.popleft()
            self._room.release()
            if delivery.cancelled():
                return
            error = delivery.exception()
            if error is not None:
                self._fail(error)
            elif event.message.generation_id == self._generation():
                event.ack()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def aclose(self) -> None:
        """Cancels what is in flight: the next owner reads it again."""
        flight = [delivery for _, delivery in self._flight]
        self._flight.clear()
        for delivery in flight:
            delivery.cancel()
        await asyncio.gather(*flight, return_exceptions=True)
        if not self.failed.cancel():
            self.failed.exception()  # It was raised, or the job was stopping: mark it as seen.


async def _until_stopping(app: faust.App, job: _GroupJob, stopping: asyncio.Event) -> None:
    """Runs the app in this loop, without Faust's signal handlers and logging setup."""
    stopped = asyncio.ensure_future(stopping.wait())
    starting = asyncio.ensure_future(app.start())
    ended = asyncio.ensure_future(app.wait_until_stopped())
    try:
        await _first_of(starting, stopped, ended)
        if starting.done():
            await starting
        await _first_of(stopped, ended, job.failed)
        if job.failed.done():
            await job.failed
        if not stopped.done():
            raise _explain(app.crash_reason)
    except KafkaError as error:
        raise _explain(error) from error
    finally:
        for waiter in (stopped, starting, ended):
            waiter.cancel()
        await asyncio.gather(stopped, starting, ended, return_exceptions=True)
        await _stop(app)


async def _stop(app: faust.App) -> None:
    """Commits what was acknowledged and leaves the group, within `STOP_S`."""
    try:
        await asyncio.wait_for(app.stop(), STOP_S)
    except (TimeoutError, KafkaError) as error:
        logger.warning("Faust did not stop cleanly, so some results will be read again: %r", error)


async def _first_of(*waiters: asyncio.Future[Any]) -> None:
    await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)


def _explain(reason: BaseException | None) -> HeadraceError:
    if isinstance(reason, HeadraceError):
        return reason
    return DependencyError(
        f"{SERVICE}: Faust's consumer stopped: {reason!r}. Check that the broker runs and that "
        f"`headrace apply` has created the topics"
    )


def _record(message: Any) -> Record:
    headers = message.headers or ()
    return Record(
        Partition(message.topic, message.partition),
        message.offset,
        message.timestamp,
        message.key,
        message.value,
        [
            (name, value or b"")
            for name, value in (headers.items() if hasattr(headers, "items") else headers)
        ],
    )


def _require_compiled_faust() -> None:
    if streams._CStreamIterator is None:  # type: ignore[attr-defined]
        raise UsageError(
            "Faust runs without its compiled extension here, so it acknowledges records that it "
            "skips at a rebalance. Install a faust-streaming wheel for this Python, and unset "
            "NO_CYTHON"
        )
