"""Shows and changes the limits of tenants, while a run goes on."""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeEnded, EpisodeStarted, QuotaSet, TaskSubmitted
from headrace.schemas.recipe.limit_settings import Tenant
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import EPISODES, OUTCOMES, QUOTAS, TASKS
from headrace.services.base.clock import now_ms
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.operate.audit.audit_trail import operation


@dataclass(frozen=True)
class TenantRow:
    """A tenant's limits and work."""

    tenant: str
    weight: float
    live_episodes: int | None
    """Maximum number of its live episodes. None: no limit of its own."""
    queued: int
    """Its tasks that have not started."""
    live: int
    """Its episodes that were started and have not ended, without those that are not run."""

    def cells(self) -> list[str]:
        """Returns a row of a table for people."""
        most = "-" if self.live_episodes is None else f"{self.live_episodes:,}"
        return [self.tenant, f"{self.weight:g}", most, f"{self.live:,}", f"{self.queued:,}"]


async def read_tenants(log: EventLog, recipe: Recipe) -> list[TenantRow]:
    """Reads all tenants that have limits or tasks, by name. It reads the whole run's tasks."""
    topics = (TASKS, QUOTAS, EPISODES, OUTCOMES)
    partitions = [one for topic in topics for one in log.topics.partitions_of(topic)]
    limits = dict(recipe.scheduler.tenants)
    submitted: dict[int, str] = {}
    begun: set[int] = set()
    started: dict[tuple[int, int], str] = {}
    ended: set[tuple[int, int]] = set()
    async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, TaskSubmitted):
                submitted[delivery.offset] = event.tenant
            elif isinstance(event, QuotaSet):
                limits[event.tenant] = limits_of(event)
            elif isinstance(event, EpisodeStarted):
                begun.add(event.task)
                if event.verdict is None:  # Refused ones count for no tenant.
                    started[event.task, event.sample] = event.submitted.tenant
            elif isinstance(event, EpisodeEnded):
                begun.add(event.task)
                ended.add((event.task, event.sample))
    queued = Counter(tenant for task, tenant in submitted.items() if task not in begun)
    live = Counter(tenant for episode, tenant in started.items() if episode not in ended)
    rows = []
    for name in sorted({*limits, *queued, *live}):
        of = limits.get(name, Tenant())
        rows.append(TenantRow(name, of.weight, of.live_episodes, queued[name], live[name]))
    return rows


def limits_of(quota: QuotaSet) -> Tenant:
    """Returns the limits that an event sets."""
    return Tenant(weight=quota.weight, live_episodes=quota.live_episodes)


async def set_quota(
    log: EventLog,
    recipe: Recipe,
    tenant: str,
    *,
    weight: float | None,
    live_episodes: int | None,
    unlimited: bool,
    reason: str,
) -> QuotaSet:
    """Changes what is given, and keeps the rest as it is. Raises UsageError if nothing is given."""
    if weight is None and live_episodes is None and not unlimited:
        raise UsageError("say what to change: give --weight, --live-episodes or --unlimited")
    if unlimited and live_episodes is not None:
        raise UsageError("give --live-episodes or --unlimited, not both")
    limits = recipe.scheduler.tenants.get(tenant, Tenant())
    before = 0
    partition = log.topics.partition(QUOTAS)
    async with aclosing(read_events(log, {partition: WHOLE})) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, QuotaSet) and delivery.event.tenant == tenant:
                limits, before = limits_of(delivery.event), delivery.event.set_at
    most = limits.live_episodes if live_episodes is None else live_episodes
    quota = QuotaSet(
        tenant=tenant,
        set_at=max(now_ms(), before + 1),  # The clock of who changed it before may be ahead.
        weight=limits.weight if weight is None else weight,
        live_episodes=None if unlimited else most,
        reason=reason,
    )
    log.signer.require(log.topics, [quota])  # What is refused is not recorded as done.
    most_text = "unlimited" if quota.live_episodes is None else quota.live_episodes
    details = f"weight {quota.weight:g}, live episodes {most_text}. {reason}"
    await log.send(operation("quota", tenant, details))
    await log.send(quota)
    return quota
