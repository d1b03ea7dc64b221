"""Turns the groups of one policy into the batches that its trainer trains on.

This job is the sole writer of `batches.<policy>`. At its start it fences its predecessor. Only then
does it read the last batch, which holds the frontier, and if groups are replayed, those before it
that the pool needs. Then it follows three topics: `groups.<policy>`,
from a little before the offset in that batch, `policies`, and `episodes`, from where the
scheduler's commit says that open tasks begin. It decides nothing before it has caught up with all
of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeStarted,
    Event,
    GroupClosed,
    PolicyPublished,
)
from headrace.schemas.topics import BATCHES, GROUPS, OFFSETS_OF_A_BATCH, POLICIES
from headrace.services.base.clock import now
from headrace.services.kafka.broker import FencedWriter, Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import (
    Back,
    CaughtUp,
    Start,
    Tail,
    follow_arrivals,
    follow_events,
    require_beginning,
)
from headrace.services.log.trace import enter_trace
from headrace.services.worker.open_episodes import SCHEDULER, open_episodes
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs.barrier import Barrier
from headrace.stream_jobs.batches import BatchAssembler
from headrace.stream_jobs.live_groups import READ_AGAIN
from headrace.stream_jobs.metrics.job_metrics import BATCH, LIVE, WAITING, note_batch
from headrace.stream_jobs.trained_policy import trained_policy

logger = logging.getLogger(__name__)

SERVICE = "assemble-batches"
MAX_WAIT_S = 5.0
"""The longest wait for a batch that becomes due: the clock may be corrected meanwhile."""


async def run(context: ServiceContext, policy: str | None = None) -> None:
    """Assembles batches for `policy` until `context.stopping`.

    None means the only policy that trains. Raises UsageError if `policy` does not train, or is None
    and not exactly one policy trains; Fenced if another process has started this job; and
    DependencyError if the broker is out of reach or it is unknown whether a batch was written. The
    next start finds out.
    """
    policy = trained_policy(context.recipe, policy)
    log = context.log
    writer = await log.broker.fenced(f"{context.namespace}.{SERVICE}.{policy}")
    try:
        barrier = Barrier(context.recipe, policy)
        assembler = BatchAssembler(context.recipe, policy, barrier=barrier)
        for batch in await _last_batches(log, policy, assembler.batches_needed):
            assembler.on_batch(batch)
        logger.info(
            "%s: from batch %d, groups from %d", policy, assembler.version, assembler.groups_read
        )
        BATCH.labels(policy).set(assembler.version)
        starts = await open_episodes(log, context.consumer_group(SCHEDULER))
        for other in barrier.others:
            starts |= await _starts_of_other(log, other)
        await _follow(context, policy, assembler, barrier, writer, starts)
    finally:
        await writer.close()


async def _last_batches(log: EventLog, policy: str, count: int) -> list[BatchAssembled]:
    """Returns the newest `count` batches in their order; fewer if the log has no more.

    Raises RecordsLost if there is none and the first records of the topic were deleted.
    """
    batches = log.topics.partition(BATCHES, policy)
    found = await _batches_from(log, batches, Tail())
    if not found:
        await require_beginning(log.broker, batches, f"batch of policy {policy}")
    ((kept, end),) = (await log.broker.ends([batches])).values()
    back = OFFSETS_OF_A_BATCH * count
    while found and min(found) > max(1, max(found) - count + 1):
        found = await _batches_from(log, batches, Back(back))
        if end - back <= kept:
            break
        back *= 2
    return [found[version] for version in sorted(found)][-count:]


async def _batches_from(
    log: EventLog, batches: Partition, start: Start
) -> dict[int, BatchAssembled]:
    """Returns the batches from `start` to the end by version."""
    found: dict[int, BatchAssembled] = {}
    async with aclosing(follow_events(log, {batches: start}, include_uncommitted=True)) as items:
        async for item in items:
            if isinstance(item, CaughtUp):
                break
            assert isinstance(item.event, BatchAssembled)
            found.setdefault(item.event.version, item.event)
    return found


async def _follow(
    context: ServiceContext,
    policy: str,
    assembler: BatchAssembler,
    barrier: Barrier,
    writer: FencedWriter,
    starts: Mapping[Partition, Start],
) -> None:
    """Reads starts, groups and publications, and writes each batch as it becomes due."""
    log, stopping = context.log, context.stopping
    groups = log.topics.partition(GROUPS, policy)
    # From the first record, because the last ones may all be of other policies.
    policies = log.topics.partition(POLICIES)
    first = await _first_group(log, groups, assembler.groups_read)
    reader = follow_arrivals(log, {groups: first, policies: "first", **starts})
    stopped = asyncio.ensure_future(stopping.wait())
    upcoming = asyncio.ensure_future(anext(reader))
    caught_up = False
    try:
        while not stopped.done():
            await asyncio.wait(
                {stopped, upcoming},
                timeout=_seconds_until(assembler.due_at(now()) if caught_up else None),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if upcoming.done():
                for item in upcoming.result():
                    caught_up = caught_up or isinstance(item, CaughtUp)
                    _add(assembler, barrier, item)
                upcoming = asyncio.ensure_future(anext(reader))
            WAITING.labels(policy).set(assembler.waiting_groups)
            LIVE.labels(policy).set(assembler.live_groups)
            if caught_up and not stopped.done():
                await _write_due(log, assembler, writer)
    finally:
        for task in (stopped, upcoming):
            task.cancel()
        await asyncio.gather(stopped, upcoming, return_exceptions=True)
        await reader.aclose()


async def _first_group(log: EventLog, groups: Partition, read: int) -> int:
    """Returns the offset to read groups from.

    Groups before `read` are decided, but their lengths say when a live group is late.
    """
    ((kept, _),) = (await log.broker.ends([groups])).values()
    return min(read, max(kept, read - READ_AGAIN))


async def _starts_of_other(log: EventLog, policy: str) -> dict[Partition, Start]:
    """Returns where to read the batches and the undecided groups of another policy of the set."""
    last = await _last_batches(log, policy, 1)
    groups = log.topics.partition(GROUPS, policy)
    ((kept, _),) = (await log.broker.ends([groups])).values()
    first = max(kept, last[0].groups_read if last else 0)
    return {groups: first, log.topics.partition(BATCHES, policy): Tail()}


def _add(assembler: BatchAssembler, barrier: Barrier, item: Delivery[Event] | CaughtUp) -> None:
    if isinstance(item, CaughtUp):
        assembler.on_caught_up(now())
        return
    enter_trace(item.traceparent)
    event = item.event
    if isinstance(event, GroupClosed) and event.policy in barrier.others:
        barrier.on_group(event)
    elif isinstance(event, GroupClosed):
        assembler.on_group(event, item.offset)
    elif isinstance(event, PolicyPublished):
        barrier.on_policy(event)
        assembler.on_policy(event)
    elif isinstance(event, EpisodeStarted):
        barrier.on_start(event)
        assembler.on_start(event, item.recorded_at)
    elif isinstance(event, BatchAssembled):
        barrier.on_batch(event)


async def _write_due(log: EventLog, assembler: BatchAssembler, writer: FencedWriter) -> None:
    while (batch := assembler.next_batch(now())) is not None:
        await log.send_all(writer, [batch])
        assembler.on_batch(batch)
        note_batch(batch)
        logger.info(
            "%s: batch %d: %d samples, %d dropped, mean reward %s",
            batch.policy,
            batch.version,
            len(batch.samples),
            len(batch.dropped),
            "-" if batch.reward_mean is None else f"{batch.reward_mean:.3f}",
        )


def _seconds_until(moment: float | None) -> float | None:
    return None if moment is None else min(MAX_WAIT_S, max(0.0, moment - now()))
