"""Reads a namespace and checks its invariants, while its run goes on or after it.

While a run goes on, topics are read one after the other, so an effect may be read without its
cause. What is found then is looked at again with all that has come since: only what still stands
is a violation. Everything that had been read the first time has its causes in the log by then.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.errors import DecodeError, RecordsLost
from headrace.schemas.events import Event
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    ACTIONS,
    DEAD_LETTERS,
    INSTANCES,
    LOADS,
    OUTCOMES,
    PROMPTS,
    TRAJECTORIES,
)
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, OffsetRange, Patience, read_records
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.verify.log_counts import LogCounts, count_log
from headrace.services.operate.verify.log_report import LogReport, examine

LOOKS = 4
"""How often a run that goes on is looked at, if something is found."""
AGAIN_S = 2.0
"""Seconds until it is looked at again."""
UNJUDGED = (DEAD_LETTERS.name, LOADS.name, INSTANCES.name)
"""Topics that no invariant is about."""
PLAYED = frozenset({ACTIONS.name, OUTCOMES.name, PROMPTS.name, TRAJECTORIES.name})
"""The topics in which the agent worker that plays an episode writes."""
PLAYERS = ("agent-", "gateway-")
SHOWN = 20


@dataclass(frozen=True)
class Verification:
    """What a check of a namespace has found."""

    namespace: str
    ended: bool
    """Whether the run has ended. Otherwise what is under way does not count."""
    counts: LogCounts
    taken_over: int
    """Episodes that another agent worker has gone on with."""
    report: LogReport

    @property
    def holds(self) -> bool:
        """Whether every invariant holds, and nothing is lost or doubled."""
        return not (self.report.violations or self.counts.lost or self.counts.doubled)

    def line(self) -> str:
        """Returns the result in one line."""
        counts = self.counts
        under_way = "" if self.ended else f", {counts.under_way:,} tasks under way"
        return (
            f"{self.namespace}: {counts.lost:,} lost, {counts.doubled:,} doubled, "
            f"{self.taken_over:,} taken over, in {counts.episodes:,} episodes of "
            f"{counts.tasks:,} tasks{under_way}"
        )

    def lines(self) -> list[str]:
        """Returns lines for people: the result, and each violation with its invariant."""
        found = self.report.violations
        lines = [self.line()]
        if again := sum(self.report.duplicates.values()):
            lines.append(f"  {again:,} records were written again; the first of an id counts")
        if self.report.undecodable:
            lines.append(f"  {self.report.undecodable:,} records could not be decoded")
        lines.append(f"  {len(found):,} violations" if found else "  no invariant is violated")
        lines += [f"  {one}" for one in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"  … and {len(found) - SHOWN:,} more: --json has all")
        return lines


@dataclass
class ReadLog:
    """What was read of a namespace so far."""

    deliveries: list[Delivery[Event]] = field(default_factory=list)
    undecodable: int = 0
    players: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """`task/sample` to the agent workers that have played it."""
    ends: dict[Partition, int] = field(default_factory=dict)

    @property
    def taken_over(self) -> int:
        """How many episodes had more than one agent worker."""
        return sum(len(workers) > 1 for workers in self.players.values())

    async def read_on(self, log: EventLog, patience: Patience | None = None) -> None:
        """Reads what the log holds now beyond what was read."""
        bounds = await log.broker.ends(await _judged(log))
        ranges: dict[Partition, OffsetRange] = {
            at: (self.ends.get(at, first), end) for at, (first, end) in bounds.items()
        }
        async with aclosing(read_records(log.broker, ranges, patience)) as records:
            async for record in records:
                self._note(log, record)
                try:
                    self.deliveries.append(await log.decode(record))
                except DecodeError:
                    self.undecodable += 1
        self.ends = {at: end for at, (_, end) in bounds.items()}

    def _note(self, log: EventLog, record: Record) -> None:
        """Notes which worker plays an episode."""
        if log.topics.by_name(record.partition.topic).topic.name not in PLAYED:
            return
        headers = dict(record.headers)
        source = headers.get("ce_source", b"").decode("utf-8", "replace")
        parts = headers.get("ce_id", b"").decode("utf-8", "replace").split("/", 2)
        if source.startswith(PLAYERS) and len(parts) > 1:
            self.players["/".join(parts[:2])].add(source)


async def _judged(log: EventLog) -> list[Partition]:
    """Returns the partitions that are read. A namespace of an older version may lack topics."""
    existing = await log.broker.list_topics()
    return [
        partition
        for topic in log.topics
        if topic.name in existing and topic.topic.name not in UNJUDGED
        for partition in topic.all_partitions()
    ]


async def require_whole(log: EventLog) -> None:
    """Raises RecordsLost if retention has deleted records that the invariants are about."""
    compacted = {topic.name for topic in log.topics if topic.topic.compacted}
    bounds = await log.broker.ends(await _judged(log))
    gone = {
        at.topic: first
        for at, (first, _) in bounds.items()
        if first > 0 and at.topic not in compacted
    }
    if gone:
        name, first = min(gone.items())
        raise RecordsLost(
            f"{len(gone)} topics of {log.topics.namespace} no longer have their first records, for "
            f"example {name} before offset {first:,}, because of their retention. So what was lost "
            "or doubled can't be counted. Verify a run while its records are kept: see `headrace "
            "topics`"
        )


async def verify(
    log: EventLog, life: RunLife, say: Callable[[str], None] = lambda line: None
) -> Verification:
    """Checks the invariants of a namespace. It reads all its records, and keeps them in memory.

    Raises RecordsLost if retention has deleted some of them.
    """
    await require_whole(log)
    recipe, read = life.recipe(), ReadLog()
    ended = life.ended is not None
    await read.read_on(log, Patience(say))
    found = examine(recipe, read.deliveries, drained=ended, undecodable=read.undecodable)
    counts = count_log(read.deliveries, ended=ended)
    for _ in range(LOOKS - 1):
        if ended or not (found.violations or counts.lost or counts.doubled):
            break
        say("something was found: looking again, because the run goes on")
        await asyncio.sleep(AGAIN_S)
        await read.read_on(log)
        found, counts = _still(found, counts, recipe, read)
    return Verification(log.topics.namespace, ended, counts, read.taken_over, found)


def _still(
    before: LogReport, counted: LogCounts, recipe: Recipe, read: ReadLog
) -> tuple[LogReport, LogCounts]:
    """Returns what was found before and is found again, with all that has been read since."""
    report = examine(recipe, read.deliveries, drained=False, undecodable=read.undecodable)
    known = set(before.violations)
    report.violations[:] = [one for one in report.violations if one in known]
    counts = count_log(read.deliveries, ended=False)
    return report, counts.still(counted)


async def read_all(log: EventLog) -> tuple[list[Delivery[Event]], int]:
    """Every event of a namespace, and how many records were none. Leaves no trace in the log."""
    ranges = {
        partition: WHOLE
        for topic in log.topics
        if topic.topic is not DEAD_LETTERS
        for partition in topic.all_partitions()
    }
    deliveries, undecodable = [], 0
    async with aclosing(read_records(log.broker, ranges)) as records:
        async for record in records:
            try:
                deliveries.append(await log.decode(record))
            except DecodeError:
                undecodable += 1
    return deliveries, undecodable


async def check_namespace(cluster: ClusterConfig, *, drained: bool = True) -> LogReport:
    """Checks a namespace as it stands on a broker. `drained`: every task must have ended."""
    async with open_namespace(cluster, "checker") as (log, life):
        deliveries, undecodable = await read_all(log)
        return examine(life.recipe(), deliveries, drained=drained, undecodable=undecodable)
