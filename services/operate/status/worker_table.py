"""The inference and env workers of a run, as they have reported in the last seconds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.schemas.events import LoadReported
from headrace.schemas.topics import LOADS
from headrace.services.base.clock import now
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import read_events
from headrace.services.worker.worker_loads import EnvironmentLoads, WorkerLoads

RECENT_S = 15.0
"""Older reports are not read."""
SHOWN = 8
"""At most so many workers of a policy or environment are printed. `--json` has all."""


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

    @property
    def group(self) -> str:
        """What the worker is listed under."""
        return self.policy

    @property
    def speed(self) -> str:
        """The worker's speed and version, for people."""
        return f"{self.seconds:.3g} s a generation   version {self.version}"


@dataclass(frozen=True)
class EnvWorkerRow:
    """One env worker, and one environment that it runs."""

    environment: str
    worker: str
    slots: int
    busy: int
    waiting: int
    """Resets and scores that wait for a slot."""
    seconds: float
    """Mean time of a reset, a step or a score, without waiting; 0 if there was none."""
    open_seconds: float
    """Mean time that a slot was in use; 0 if there was none."""
    suspected: bool
    """Several of its reports are missing."""

    @property
    def group(self) -> str:
        """What the worker is listed under."""
        return f"environment {self.environment}"

    @property
    def speed(self) -> str:
        """The worker's speed, for people."""
        return f"{self.seconds:.3g} s an action   {self.open_seconds:.3g} s open"


async def read_workers(log: EventLog) -> tuple[list[WorkerRow], list[EnvWorkerRow]]:
    """Reads the workers of every policy, and of every environment, by its name and the worker's.

    It finds no worker in a namespace that was made before there were reports.
    """
    at = log.topics.partition(LOADS)
    if at.topic not in await log.broker.list_topics():
        return [], []
    since = now() - RECENT_S
    start = (await log.broker.offsets_at([at], since))[at]
    reports = []
    async with aclosing(read_events(log, {at: (start, 2**63 - 1)})) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, LoadReported):
                reports.append((delivery.event, delivery.recorded_at))
    names = sorted({one.environment for report, _ in reports for one in report.environments})
    policies = WorkerLoads(log.topics.policies, log.topics.pool_partitions)
    environments = EnvironmentLoads(names, log.topics.action_partitions)
    for report, recorded_at in reports:
        policies.on_report(report, recorded_at)
        environments.on_report(report, recorded_at)
    now_s = now()
    return [
        WorkerRow(
            policy=policy,
            worker=known.worker,
            slots=known.load.slots,
            busy=known.load.busy,
            waiting=known.load.waiting,
            seconds=known.load.run_ms / 1000,
            version=known.load.version,
            suspected=known.is_suspected(now_s),
        )
        for policy in log.topics.policies
        for known in sorted(policies.alive(policy, now_s), key=lambda one: one.worker)
    ], [
        EnvWorkerRow(
            environment=name,
            worker=known.worker,
            slots=known.load.slots,
            busy=known.load.busy,
            waiting=known.load.waiting,
            seconds=known.load.run_ms / 1000,
            open_seconds=known.load.open_ms / 1000,
            suspected=known.is_suspected(now_s),
        )
        for name in names
        for known in sorted(environments.alive(name, now_s), key=lambda one: one.worker)
    ]


def worker_lines(rows: Sequence[WorkerRow | EnvWorkerRow], groups: Sequence[str]) -> list[str]:
    """Returns lines for people: one for each group, and one for each of its first workers."""
    lines = []
    for group in groups:
        own = [row for row in rows if row.group == group]
        lines.append(
            f"  workers       {group}: {len(own)}   slots {sum(row.slots for row in own):,}   "
            f"busy {sum(row.busy for row in own):,}   waiting {sum(row.waiting for row in own):,}"
        )
        for row in own[:SHOWN]:
            lines.append(
                f"    {row.worker}   slots {row.slots:,}   busy {row.busy:,}   "
                f"waiting {row.waiting:,}   {row.speed}" + ("   silent" if row.suspected else "")
            )
        if len(own) > SHOWN:
            lines.append(f"    … and {len(own) - SHOWN:,} more")
    return lines
