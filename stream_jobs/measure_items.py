"""Keeps the statistics of the items of a data set, for one policy.

This job is the sole writer of `items.<policy>`. At its start it fences its predecessor. Only then
does it read the newest record of each item, which also say from which group to go on. It writes the
items that changed a moment later, all in one transaction.
docs/decisions/0028-count-items-in-a-fenced-fold-over-groups.md says why it is not a Faust table.
"""

from __future__ import annotations

import asyncio
import logging

from headrace.schemas.events import Event, GroupClosed
from headrace.schemas.topics import GROUPS
from headrace.services.kafka.broker import FencedWriter
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.tasks.curation.item_statistics import ItemStatistics
from headrace.services.tasks.curation.read_items import first_group, read_items
from headrace.services.worker.service_context import ServiceContext
from headrace.stream_jobs.metrics.job_metrics import ITEMS
from headrace.stream_jobs.trained_policy import trained_policy

logger = logging.getLogger(__name__)

SERVICE = "item-statistics"
WRITE_EVERY_S = 0.5
"""How long a changed item waits for others that change."""
MAX_CHANGED = 1024
"""The most items in one transaction."""


async def run(context: ServiceContext, policy: str | None = None) -> None:
    """Keeps the statistics for `policy` until `context.stopping`.

    None means the only policy that trains. Raises UsageError if `policy` does not train, or is None
    and not exactly one policy trains; Fenced if another process has started this job; and
    DependencyError if the broker is out of reach or it is unknown whether records were written. The
    next start finds out.
    """
    policy = trained_policy(context.recipe, policy)
    log = context.log
    writer = await log.broker.fenced(f"{context.namespace}.{SERVICE}.{policy}")
    try:
        statistics = await read_items(log, policy)
        tasks = statistics.tasks
        ITEMS.labels(policy).set(len(statistics))
        first = await first_group(log, policy, tasks.groups_read, tasks.newest)
        logger.info("%s: %d items, groups from %d", policy, len(statistics), first)
        await _follow(context, policy, statistics, writer, first)
    finally:
        await writer.close()


async def _follow(
    context: ServiceContext,
    policy: str,
    statistics: ItemStatistics,
    writer: FencedWriter,
    first: int,
) -> None:
    """Reads groups from the offset `first` on, and writes the items that changed."""
    log = context.log
    groups = log.topics.partition(GROUPS, policy)
    reader = follow_events(log, {groups: first})
    stopped = asyncio.ensure_future(context.stopping.wait())
    upcoming = asyncio.ensure_future(anext(reader))
    clock = asyncio.get_running_loop().time
    due_s: float | None = None
    try:
        while not stopped.done():
            timeout = None if due_s is None else max(0.0, due_s - clock())
            await asyncio.wait({stopped, upcoming}, timeout=timeout, return_when="FIRST_COMPLETED")
            if upcoming.done():
                _add(statistics, upcoming.result())
                upcoming = asyncio.ensure_future(anext(reader))
            if due_s is None and statistics.changed:
                due_s = clock() + WRITE_EVERY_S
            full = statistics.changed >= MAX_CHANGED
            if full or (due_s is not None and (stopped.done() or clock() >= due_s)):
                await _write(log, statistics, writer)
                ITEMS.labels(policy).set(len(statistics))
                due_s = None
    finally:
        for task in (stopped, upcoming):
            task.cancel()
        await asyncio.gather(stopped, upcoming, return_exceptions=True)
        await reader.aclose()


def _add(statistics: ItemStatistics, item: Delivery[Event] | CaughtUp) -> None:
    if isinstance(item, Delivery) and isinstance(item.event, GroupClosed):
        statistics.on_group(item.event, item.offset)


async def _write(log: EventLog, statistics: ItemStatistics, writer: FencedWriter) -> None:
    events = statistics.take_changed()
    await log.send_all(writer, events)
    logger.debug("wrote %d items, groups to %d", len(events), statistics.tasks.newest)
