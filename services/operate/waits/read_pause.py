"""Reads whether any process of a run runs."""

from __future__ import annotations

from contextlib import aclosing

from headrace.schemas.events import InstanceStateEntered, LoadReported
from headrace.schemas.topics import INSTANCES, LOADS
from headrace.services.base.clock import now
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import read_events
from headrace.services.namespace.apply import CONSUMERS
from headrace.services.operate.waits.heard_workers import SILENT_S, HeardWorkers

RECORDS = 5_000
"""Records of `instances` that are read, the newest ones."""


async def read_pause(log: EventLog) -> float | None:
    """Returns since when no process of a run runs. None: one does, or none was heard of."""
    broker, topics = log.broker, log.topics
    for service in CONSUMERS:
        if await broker.members(f"{topics.namespace}.{service}"):
            return None
    lives, loads = topics.partition(INSTANCES), topics.partition(LOADS)
    existing = await broker.list_topics()
    if lives.topic not in existing or loads.topic not in existing:
        return None
    first, end = (await broker.ends([lives]))[lives]
    since = (await broker.offsets_at([loads], now() - SILENT_S))[loads]
    ranges = {lives: (max(first, end - RECORDS), end), loads: (since, 2**63 - 1)}
    heard = HeardWorkers(())
    async with aclosing(read_events(log, ranges)) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, LoadReported):
                heard.on_report(delivery.event, delivery.recorded_at)
            elif isinstance(delivery.event, InstanceStateEntered):
                heard.on_life(delivery.event, delivery.recorded_at)
    return heard.ended_at(now())
