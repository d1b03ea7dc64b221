"""Where a run stands, for `headrace status`: read from its topics, never asked of a process."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from schemas.topics import DEAD_LETTERS, OUTCOMES, RESULTS, TASKS
from services.apply import lags, shared_partitions
from services.kafka.broker import Partition
from services.log import EventLog
from services.namespaces import open_namespace
from services.run.life import RunLife
from services.run.progress import Progress
from services.run.view import published, sparkline
from services.run.watch import read_recent
from services.settings import Where

RECENT = 1_000
"""Offsets of each partition that are read: enough for rewards and curves, whatever a run's age."""


@dataclass(frozen=True)
class Standing:
    """A run, as its topics have it."""

    namespace: str
    recipe: str
    state: str
    reason: str
    versions: dict[str, int]
    """Newest published, by policy; -1 before version 0."""
    rewards: dict[str, float | None]
    curves: dict[str, list[float]]
    evaluations: dict[str, object]
    """What the versions evaluated last were measured at, by policy and version."""
    evaluated: dict[str, str]
    """The last of them in words, by policy."""
    tasks_submitted: int
    tasks_started: int
    tasks_ended: int
    episodes: int
    failures: int
    """Episodes that the infrastructure failed for good, of the last `failures_of`."""
    failures_of: int
    lags: dict[str, int]
    """Undone records, by consumer group."""
    dead_letters: int

    def to_tree(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        why = f" ({self.reason})" if self.reason else ""
        lines = [f"{self.namespace}: {self.state}{why}, recipe {self.recipe}"]
        for name, version in self.versions.items():
            reward = self.rewards[name]
            shown = "-" if reward is None else f"{reward:.3f}"
            curve = sparkline(self.curves[name], 32)
            lines.append(
                f"  policy {name:<12} version {published(version)}   reward {shown}  {curve}"
            )
            if name in self.evaluated:
                lines.append(f"    evaluated   {self.evaluated[name]}")
        lines += [
            f"  tasks         submitted {self.tasks_submitted:,}   started "
            f"{self.tasks_started:,}   ended {self.tasks_ended:,}",
            f"  episodes      ended {self.episodes:,}   failed {self.failures:,}"
            + (f" of the last {self.failures_of:,}" if self.failures_of < self.episodes else ""),
            "  lag           " + "   ".join(f"{name} {lag:,}" for name, lag in self.lags.items()),
            f"  dead letters  {self.dead_letters:,}",
        ]
        return lines


async def read_standing(where: Where) -> Standing:
    """Reads it all. UsageError where there is no such run."""
    async with open_namespace(where, "status") as (log, life):
        return await standing_of(log, life)


async def standing_of(log: EventLog, life: RunLife, recent: int = RECENT) -> Standing:
    """Where a run stands, by the last `recent` offsets of each partition. Leaves no trace.

    What lies before them is counted by offset, so a record that was written twice counts twice.
    """
    recipe = life.recipe()
    progress = Progress(recipe)
    begins = await read_recent(log, progress, recent)
    last = life.ended or life.ending
    versions = recipe.stop.reward_versions
    before: Counter[str] = Counter()
    for place, begin in begins.items():
        before[place.topic] += begin
    tasks, results = log.topics.name(TASKS), log.topics.name(RESULTS)
    return Standing(
        namespace=log.topics.namespace,
        recipe=recipe.name,
        state=life.state,
        reason="" if last is None else last.reason,
        versions=progress.versions(),
        rewards={name: policy.reward(versions) for name, policy in progress.policies.items()},
        curves={name: policy.curve() for name, policy in progress.policies.items()},
        evaluations=progress.evaluations.to_tree(),
        evaluated={
            name: f"version {version}   {evaluation}"
            for name in progress.policies
            for version, evaluation in progress.evaluations.of(name).items()
        },
        tasks_submitted=progress.submitted + before[tasks],
        tasks_started=await _started(log),
        tasks_ended=progress.tasks_ended + before[results],
        episodes=await _episodes(log) if before[results] else progress.episodes,
        failures=progress.failures,
        failures_of=progress.episodes,
        lags=await lags(log.broker, log.topics),
        dead_letters=await _dead_letters(log),
    )


async def _episodes(log: EventLog) -> int:
    """Outcomes, by offset."""
    name = log.topics.name(OUTCOMES)
    places = [Partition(name, number) for number in range(log.topics.partitions)]
    return sum(end for _, end in (await log.broker.ends(places)).values())


async def _started(log: EventLog) -> int:
    """The scheduler's place in `tasks`: what lies before it has been started, or refused."""
    group, partitions = shared_partitions(log.topics, "scheduler")
    assert partitions == [Partition(log.topics.name(TASKS), 0)]
    committed = await log.broker.committed(group, partitions)
    return sum(place.offset for place in committed.values())


async def _dead_letters(log: EventLog) -> int:
    place = Partition(log.topics.name(DEAD_LETTERS), 0)
    first, end = (await log.broker.ends([place]))[place]
    return end - first
