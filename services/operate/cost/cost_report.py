"""What a run's workers cost, and what came of it. The fold is pure; `read_cost` reads the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from headrace.schemas.events import Event, InstanceStateEntered, PolicyPublished, TaskEnded
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.role_rewards import passes
from headrace.schemas.topics import INSTANCES, POLICIES, RESULTS
from headrace.services.base.clock import now
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.cost.worker_lives import (
    Span,
    WorkerLife,
    WorkerLives,
    covered_s,
    most_at_once,
)

HOUR_S = 3600.0
HEAD = ("pool", "workers", "alive", "peak", "hours", "unsure", "price", "cost", "if fixed")


@dataclass(frozen=True)
class PoolCost:
    """The workers of one service, or of one policy of it."""

    pool: str
    workers: int
    """Processes, each restart counted."""
    alive: int
    peak: int
    """Most workers at the same time."""
    hours: float
    """Worker-hours: the sum of the times that its workers lived."""
    unsure_hours: float
    """Killed workers may have lived longer by at most this sum."""
    price_per_hour: float | None
    """Of one worker; None if the recipe has no price."""
    cost: float | None
    fixed_hours: float
    """Worker-hours of a pool that has had as many workers as the peak during the whole run."""
    fixed_cost: float | None

    def cells(self) -> list[str]:
        """Returns a row for people."""
        numbers = f"{self.workers:,}", f"{self.alive:,}", f"{self.peak:,}"
        hours = f"{self.hours:,.3f}", f"{self.unsure_hours:,.3f}"
        money = _money(self.price_per_hour), _money(self.cost)
        return [self.pool, *numbers, *hours, *money, f"{self.fixed_hours:,.3f}"]


@dataclass(frozen=True)
class CostReport:
    """What a run cost until `until_s`. A recipe without prices gives no sums of money."""

    namespace: str
    until_s: float
    """Seconds since the epoch."""
    active_hours: float
    """Hours in which at least one worker lived."""
    pools: tuple[PoolCost, ...]
    tasks: int
    """Tasks that have ended by themselves: neither cancelled nor refused."""
    solved: int
    """Tasks of which at least one sample has passed."""
    passing: float
    """A sample has passed if its reward is at least this."""
    versions: Mapping[str, int]
    """By policy: versions that were published after version 0."""
    complete: bool
    """False if records of `instances` are gone: workers that ended long ago are then not counted.
    """

    @property
    def hours(self) -> float:
        """All worker-hours."""
        return sum(pool.hours for pool in self.pools)

    @property
    def cost(self) -> float | None:
        """What all pools with a price cost."""
        return _total([pool.cost for pool in self.pools])

    @property
    def fixed_cost(self) -> float | None:
        """What these pools would have cost with as many workers as at their peak all the time."""
        return _total([pool.fixed_cost for pool in self.pools])

    def each(self) -> dict[str, float | None]:
        """Returns the cost of a task, of a solved task and of a version."""
        counts = {"task": self.tasks, "solved task": self.solved}
        counts["version"] = sum(self.versions.values())
        cost = self.cost
        return {
            name: cost / count if cost is not None and count else None
            for name, count in counts.items()
        }

    def tree(self) -> dict[str, Any]:
        """Returns JSON values."""
        each = {f"cost_per_{name.replace(' ', '_')}": cost for name, cost in self.each().items()}
        sums = {"hours": self.hours, "cost": self.cost, "fixed_cost": self.fixed_cost}
        return {**asdict(self), **sums, **each}

    def lines(self) -> list[str]:
        """Returns the lines for people that come after the table of pools."""
        fixed = sum(pool.fixed_hours for pool in self.pools)
        versions = sum(self.versions.values())
        lines = [
            f"{self.hours:,.3f} worker-hours within {self.active_hours:,.3f} hours. With as many "
            f"workers as at the peak all the time: {fixed:,.3f} ({_change(self.hours, fixed)})",
            f"{self.tasks:,} tasks, {self.solved:,} solved (reward >= {self.passing:g}), "
            f"{versions:,} versions",
        ]
        if self.cost is None:
            lines.append("no price is known: set workers.price_per_hour, or give --price")
        else:
            lines.append(f"cost {_money(self.cost)}, if fixed {_money(self.fixed_cost)}")
            lines += [f"cost of a {name}: {_money(one)}" for name, one in self.each().items()]
            if missing := [pool.pool for pool in self.pools if pool.cost is None]:
                lines.append(f"not counted, because no price is known: {', '.join(missing)}")
        if not self.complete:
            lines.append("workers that ended before the oldest record of `instances` are missing")
        return lines


class CostSum:
    """Folds the events of a run."""

    def __init__(self, passing: float) -> None:
        """`passing` is the reward from which a sample has passed."""
        self.complete = True
        self._passing = passing
        self._lives = WorkerLives()
        self._ended = Frontier()
        self._counts: Counter[str] = Counter()
        self._versions: dict[str, set[int]] = {}

    def on_event(self, event: Event, at_s: float) -> None:
        """Adds an event that was recorded at `at_s`, in seconds since the epoch."""
        match event:
            case InstanceStateEntered():
                self._lives.on_instance(event, at_s)
            case PolicyPublished() if event.version > 0:
                self._versions.setdefault(event.policy, set()).add(event.version)
            case TaskEnded() if event.task not in self._ended:
                self._ended.add(event.task)
                if event.closed_by == "all":
                    rewards = [one.reward for one in event.outcomes if one.reward is not None]
                    self._counts["tasks"] += 1
                    self._counts["solved"] += any(passes(one, self._passing) for one in rewards)

    def report(self, namespace: str, until_s: float, prices: Mapping[str, float]) -> CostReport:
        """Returns the report as of `until_s`. `prices` is by pool or service, for an hour."""
        pools = self._lives.by_pool()
        spans = [life.span(until_s) for lives in pools.values() for life in lives]
        active = covered_s(spans) / HOUR_S
        return CostReport(
            namespace=namespace,
            until_s=until_s,
            active_hours=active,
            pools=tuple(
                _pool_cost(lives, [life.span(until_s) for life in lives], active, prices)
                for lives in pools.values()
            ),
            tasks=self._counts["tasks"],
            solved=self._counts["solved"],
            passing=self._passing,
            versions={policy: len(found) for policy, found in sorted(self._versions.items())},
            complete=self.complete,
        )


def _pool_cost(
    lives: list[WorkerLife], spans: list[Span], active: float, prices: Mapping[str, float]
) -> PoolCost:
    pool, service = lives[0].pool, lives[0].service
    price = prices.get(pool, prices.get(service))
    hours = sum(span.seconds for span in spans) / HOUR_S
    peak = most_at_once(spans)
    return PoolCost(
        pool=pool,
        workers=len(lives),
        alive=sum(span.alive for span in spans),
        peak=peak,
        hours=hours,
        unsure_hours=sum(span.unsure_s for span in spans) / HOUR_S,
        price_per_hour=price,
        cost=None if price is None else price * hours,
        fixed_hours=peak * active,
        fixed_cost=None if price is None else price * peak * active,
    )


async def read_cost(
    log: EventLog, life: RunLife, prices: Mapping[str, float], passing: float | None
) -> CostReport:
    """Reads what the run of `log` cost. `prices` override those of its recipe.

    `passing` is that of the recipe's evaluation if it is None.
    """
    recipe: Recipe = life.recipe()
    if passing is None:
        passing = 1.0 if recipe.evaluation is None else recipe.evaluation.passing
    total = CostSum(passing)
    existing = await log.broker.list_topics()
    at = [
        partition
        for topic in (INSTANCES, RESULTS, POLICIES)
        for partition in log.topics.partitions_of(topic)
        if partition.topic in existing
    ]
    instances = log.topics.partition(INSTANCES)
    total.complete = instances in at and (await log.broker.ends([instances]))[instances][0] == 0
    async with aclosing(read_events(log, dict.fromkeys(at, WHOLE))) as deliveries:
        async for delivery in deliveries:
            total.on_event(delivery.event, delivery.recorded_at)
    return total.report(log.topics.namespace, now(), {**recipe.workers.price_per_hour, **prices})


def _total(costs: list[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known else None


def _money(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.4g}" if amount < 1 else f"{amount:,.2f}"


def _change(now: float, before: float) -> str:
    if not before:
        return "nothing to compare"
    percent = round(100 * (now / before - 1))
    return f"{percent:+d}%" if percent else "no difference"
