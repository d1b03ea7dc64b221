"""Shows and changes the limits of calls and of environments, while a run goes on."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    LimitSet,
    LimitShared,
    LoadReported,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import EPISODES, LIMITS, LOADS, OUTCOMES, SHARES, Partition, Topic
from headrace.services.base.clock import now, now_ms
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.operate.audit.audit_trail import operation
from headrace.services.worker.limits.limits_of import (
    all_limits,
    environment_limits,
    limits_of_use,
    new_value,
)

RECENT_S = 15.0
"""Older reports of workers are not read."""


@dataclass(frozen=True)
class LimitRow:
    """A limit of calls or of live episodes, and its use."""

    limit: str
    units: int
    period_s: float
    """0 if a unit is free again as soon as its call or episode has ended."""
    held: int
    """Units in use, as the newest reports say."""
    waiting: int
    """Calls that wait for a unit, or for something else."""
    workers: int
    """Workers that have a share."""
    drained: bool
    """Whether no more units are in use than the limit has. If not, its value was lowered, and takes
    effect as calls end."""

    def cells(self) -> list[str]:
        """Returns a row of a table for people."""
        period = f"per {self.period_s:g} s" if self.period_s else "in flight"
        state = "" if self.drained else "draining"
        counts = [f"{one:,}" for one in (self.units, self.held, self.waiting, self.workers)]
        return [self.limit, counts[0], period, *counts[1:], state]


async def read_limits(log: EventLog, recipe: Recipe) -> list[LimitRow]:
    """Reads all limits of a run but those of tenants, as the recipe names them."""
    return [*await _read_environments(log, recipe), *await _read_calls(log, recipe)]


async def _read_environments(log: EventLog, recipe: Recipe) -> list[LimitRow]:
    """Reads the limits of environments and images, and the live episodes."""
    limits = environment_limits(recipe)
    if not limits:
        return []
    partitions = [one for topic in (LIMITS, EPISODES, OUTCOMES) for one in _of(log, topic)]
    live: dict[tuple[int, int], tuple[str, str]] = {}
    ended: set[tuple[int, int]] = set()
    async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, LimitSet) and event.limit in limits:
                limits[event.limit] = new_value(limits[event.limit], event)
            elif isinstance(event, EpisodeStarted) and event.verdict is None:
                if (use := event.submitted.environment) is not None:
                    names = limits_of_use(recipe, use.use, use.image)
                    live[event.task, event.sample] = names
            elif isinstance(event, EpisodeEnded):
                ended.add((event.task, event.sample))
    held = Counter(name for one, names in live.items() if one not in ended for name in names)
    return [
        LimitRow(name, limit.units, 0.0, held[name], 0, 0, held[name] <= limit.units)
        for name, limit in limits.items()
    ]


def _of(log: EventLog, topic: Topic[Any]) -> list[Partition]:
    return log.topics.partitions_of(topic)


async def _read_calls(log: EventLog, recipe: Recipe) -> list[LimitRow]:
    limits = all_limits(recipe)
    if not limits:
        return []
    at = log.topics.partition(LOADS)
    start = (await log.broker.offsets_at([at], now() - RECENT_S))[at]
    ranges = {log.topics.partition(topic): WHOLE for topic in (LIMITS, SHARES)}
    divided: dict[str, LimitShared] = {}
    reports: dict[str, LoadReported] = {}
    async with aclosing(read_events(log, {**ranges, at: (start, WHOLE[1])})) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, LimitSet) and event.limit in limits:
                limits[event.limit] = new_value(limits[event.limit], event)
            elif isinstance(event, LimitShared):
                divided[event.limit] = event
            elif isinstance(event, LoadReported):
                reports[event.worker] = event
    uses = [use for report in reports.values() if not report.leaving for use in report.limits]
    rows = []
    for name, limit in limits.items():
        own = [use for use in uses if use.limit == name]
        shares = divided[name].shares if name in divided else ()
        rows.append(
            LimitRow(
                limit=name,
                units=limit.units,
                period_s=limit.period_s,
                held=sum(use.held for use in own),
                waiting=sum(max(0, use.wanted - use.held) for use in own),
                workers=sum(share.units > 0 for share in shares),
                drained=sum(use.held for use in own) <= limit.units,
            )
        )
    return rows


async def set_limit(
    log: EventLog, recipe: Recipe, limit: str, *, units: int, period_s: float | None, reason: str
) -> LimitSet:
    """Changes a limit. Raises UsageError if the recipe does not set it, or if it has no period."""
    limits = all_limits(recipe) | environment_limits(recipe)
    if limit not in limits:
        known = ", ".join(limits) or "no limit"
        raise UsageError(
            f"{limit!r} is not a limit that the recipe of this run sets. It sets: {known}. To be "
            "able to change another one later, set it in the recipe before the run starts; a large "
            "value restricts nothing"
        )
    if period_s is not None and not limits[limit].period_ms:
        raise UsageError(f"{limit} has no period: leave out --period-s")
    before = 0
    async with aclosing(read_events(log, dict.fromkeys(_of(log, LIMITS), WHOLE))) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, LimitSet) and delivery.event.limit == limit:
                before = delivery.event.set_at
    event = LimitSet(
        limit=limit,
        set_at=max(now_ms(), before + 1),  # The clock of who changed it before may be ahead.
        units=units,
        period_ms=0 if period_s is None else max(1, round(1000 * period_s)),
        reason=reason,
    )
    log.signer.require(log.topics, [event])  # What is refused is not recorded as done.
    period = f" per {period_s:g} s" if period_s is not None else ""
    await log.send(operation("quota", limit, f"{units} units{period}. {reason}"))
    await log.send(event)
    return event
