"""What a chaos run found, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from headrace.schemas.events import BatchAssembled, EpisodeEnded, EpisodeStarted, Event, GroupClosed
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import LogReport
from tests.chaos.watch import Gap

GAP_BAR_S = 10.0
"""The 99th percentile that a worker's gap is to keep."""


@dataclass(frozen=True)
class GapFigures:
    """The gaps of one service, in seconds."""

    service: str
    kills: int
    measured: int
    unended: int
    """Gaps that no successor has ended; those of idle processes are neither."""
    p50: float
    p99: float
    longest: float

    @classmethod
    def of(cls, service: str, gaps: Sequence[Gap]) -> GapFigures:
        """From its kills. One whose process had written nothing of late isn't measured."""
        times = sorted(gap.seconds for gap in gaps if gap.seconds is not None)
        figures = [_quantile(times, at) for at in (0.5, 0.99, 1.0)]
        return cls(service, len(gaps), len(times), sum(gap.lasts for gap in gaps), *figures)


@dataclass
class Outcome:
    """All that is reported."""

    seed: int
    brokers: int
    seconds: float
    injections: dict[str, int]
    records: int
    tasks: int
    episodes: int
    batches: int
    trained: int
    dropped: int
    lost: list[str]
    doubled: list[str]
    violations: list[str]
    duplicates: dict[str, int]
    endings: dict[str, int]
    restarts: int
    drains_s: list[float]
    not_drained: list[str]
    gaps_alone: list[GapFigures] = field(default_factory=list)
    gaps_in_mixes: list[GapFigures] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing lost, nothing doubled, everything drained."""
        return not (self.lost or self.doubled or self.violations or self.not_drained)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(asdict(self) | {"good": self.good}, indent=2)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(self.injections.items()))
        drains = sorted(self.drains_s)
        lines = [
            f"chaos: seed {self.seed}, {self.brokers} broker(s), {self.seconds:.0f} s",
            f"injections {sum(self.injections.values())}: {kinds}",
            f"records {self.records:,}, tasks {self.tasks:,}, episodes {self.episodes:,}, "
            f"batches {self.batches:,}, restarts {self.restarts:,}",
            f"samples trained {self.trained:,}, dropped with a reason {self.dropped:,}; "
            f"endings {self.endings}; duplicates passed over {self.duplicates}",
            f"lost {len(self.lost)}, doubled {len(self.doubled)}, "
            f"violations {len(self.violations)}",
            *(f"  {line}" for line in (*self.lost[:10], *self.doubled[:10], *self.violations[:40])),
            f"drains {len(drains)}: p50 {_quantile(drains, 0.5):.1f} s, "
            f"longest {_quantile(drains, 1.0):.1f} s",
            *(f"  NOT DRAINED: {line}" for line in self.not_drained),
            *_table("gap after a kill -9, nothing else wrong", self.gaps_alone),
            *_table("gap after a kill -9 among other faults", self.gaps_in_mixes),
        ]
        return "\n".join(lines)


def figures(gaps: Iterable[Gap]) -> list[GapFigures]:
    """By service, and of all."""
    by_service: dict[str, list[Gap]] = {}
    for gap in gaps:
        by_service.setdefault(gap.service, []).append(gap)
    every = [gap for several in by_service.values() for gap in several]
    rows = [GapFigures.of(service, several) for service, several in sorted(by_service.items())]
    return [*rows, GapFigures.of("all", every)] if rows else []


def losses(deliveries: Iterable[Delivery[Event]]) -> tuple[list[str], list[str]]:
    """What is lost and what is doubled among samples, counted apart from the checker.

    Every episode that was started must have ended, and every sample of a group's first record must
    be in one batch, once: trained on or dropped with a reason. What a fenced writer writes must be
    there once.
    """
    facts = Facts.of(deliveries)
    started = {(one.event.task, one.event.sample) for one in facts.all(EpisodeStarted)}
    ended = {(one.event.task, one.event.sample) for one in facts.all(EpisodeEnded)}
    lost = [f"episode {task}/{sample} never ended" for task, sample in sorted(started - ended)]
    decided: dict[tuple[str, int, int], int] = {}
    whole: set[tuple[str, int]] = set()
    # Every record, not only the first of an id: none of a fenced writer may be doubled.
    batches = [*facts.all(BatchAssembled), *facts.again[BatchAssembled]]
    for batch in (one.event for one in batches):
        for sample in (one for one in batch.samples if one.use == 0):
            key = (batch.policy, sample.task, sample.sample)
            decided[key] = decided.get(key, 0) + 1
        for drop in batch.dropped:
            if drop.sample < 0:
                whole.add((batch.policy, drop.task))
            else:
                key = (batch.policy, drop.task, drop.sample)
                decided[key] = decided.get(key, 0) + 1
    for group in (one.event for one in facts.all(GroupClosed)):
        for member in group.samples:
            key = (group.policy, group.task, member.sample)
            if key not in decided and (group.policy, group.task) not in whole:
                lost.append(f"sample {group.task}/{member.sample} is in no batch")
    doubled = [
        f"sample {task}/{sample} is in {number} batches"
        for (_, task, sample), number in decided.items()
        if number > 1
    ]
    for kind in (EpisodeStarted, BatchAssembled):
        for records in facts.records[kind].values():
            if len(records) > 1:
                places = ", ".join(_place(one) for one in records)
                doubled.append(f"{kind.__name__} {records[0].event.event_id} at {places}")
    return lost, doubled


def _place(one: Delivery[Event]) -> str:
    return f"{one.partition.number}@{one.offset} ({one.recorded_at:.3f})"


def endings(deliveries: Iterable[Delivery[Event]]) -> dict[str, int]:
    """How the episodes that count ended."""
    counted: dict[str, int] = {}
    for one in Facts.of(deliveries).all(EpisodeEnded):
        counted[one.event.ending] = counted.get(one.event.ending, 0) + 1
    return counted


def summary(report: LogReport) -> dict[str, int]:
    """The checker's figures under this report's names."""
    return {
        "tasks": report.tasks,
        "episodes": report.episodes,
        "batches": sum(report.batches.values()),
        "trained": report.trained,
        "dropped": report.dropped.total(),
    }


def _table(title: str, rows: Sequence[GapFigures]) -> list[str]:
    if not rows:
        return []
    head = f"  {'service':<18}{'kills':>7}{'measured':>10}{'unended':>9}"
    head += f"{'p50 s':>8}{'p99 s':>8}{'max s':>8}"
    return [
        f"{title} (bar: p99 of {GAP_BAR_S:g} s)",
        head,
        *(
            f"  {row.service:<18}{row.kills:>7}{row.measured:>10}{row.unended:>9}{row.p50:>8.1f}"
            f"{row.p99:>8.1f}{row.longest:>8.1f}"
            for row in rows
        ),
    ]


def _quantile(ordered: Sequence[float], at: float) -> float:
    """The smallest value that is no smaller than this part of all; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(at * len(ordered)) - 1)]
