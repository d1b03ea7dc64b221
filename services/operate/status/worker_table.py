"""The inference workers of a run, as they have reported in the last seconds."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from headrace.schemas.events import LoadReported
from headrace.schemas.topics import LOADS
from headrace.services.base.clock import now
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import read_events
from headrace.services.worker.worker_loads import WorkerLoads

RECENT_S = 15.0
"""Older reports are not read."""
SHOWN = 8
"""At most so many workers of a policy are printed. `--json` has all."""


@dataclass(frozen=True)
class WorkerRow:
    """One worker of a policy."""

    policy: str
    worker: str
    slots: int
    busy: int
    waiting: int
    """Prompts that wait for a slot."""
    seconds: float
    """Mean time of a generation, without waiting; 0 if there was none."""
    version: int
    suspected: bool
    """Several of its reports are missing."""


async def read_workers(log: EventLog) -> list[WorkerRow]:
    """Reads the workers of every policy, by policy and name.

    It finds no worker in a namespace that was made before there were reports.
    """
    at = log.topics.partition(LOADS)
    if at.topic not in await log.broker.list_topics():
        return []
    since = now() - RECENT_S
    start = (await log.broker.offsets_at([at], since))[at]
    loads = WorkerLoads(log.topics.policies, log.topics.pool_partitions)
    async with aclosing(read_events(log, {at: (start, 2**63 - 1)})) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, LoadReported):
                loads.on_report(delivery.event, delivery.recorded_at)
    return [
        WorkerRow(
            policy=policy,
            worker=known.worker,
            slots=known.load.slots,
            busy=known.load.busy,
            waiting=known.load.waiting,
            seconds=known.load.run_ms / 1000,
            version=known.load.version,
            suspected=known.is_suspected(now()),
        )
        for policy in log.topics.policies
        for known in sorted(loads.alive(policy, now()), key=lambda one: one.worker)
    ]


def worker_lines(rows: list[WorkerRow], policies: list[str]) -> list[str]:
    """Returns lines for people: one for each policy, and one for each of its first workers."""
    lines = []
    for policy in policies:
        own = [row for row in rows if row.policy == policy]
        lines.append(
            f"  workers       {policy}: {len(own)}   slots {sum(row.slots for row in own):,}   "
            f"busy {sum(row.busy for row in own):,}   waiting {sum(row.waiting for row in own):,}"
        )
        for row in own[:SHOWN]:
            lines.append(
                f"    {row.worker}   slots {row.slots:,}   busy {row.busy:,}   "
                f"waiting {row.waiting:,}   {row.seconds:.3g} s a generation   "
                f"version {row.version}" + ("   silent" if row.suspected else "")
            )
        if len(own) > SHOWN:
            lines.append(f"    … and {len(own) - SHOWN:,} more")
    return lines
