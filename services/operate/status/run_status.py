"""Reads the status of a run from its topics. No process is asked for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.schemas.topics import OUTCOMES, RESULTS, TASKS
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import lags, shared_partitions
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.dead_letters.dead_letters import count_open
from headrace.services.operate.run.live_view import policy_line, sparkline
from headrace.services.operate.run.progress import Progress
from headrace.services.operate.run.watch import read_recent
from headrace.services.operate.status.worker_table import (
    EnvWorkerRow,
    WorkerRow,
    read_workers,
    worker_lines,
)
from headrace.services.operate.waits.heard_workers import CONTINUE, PAUSED
from headrace.services.operate.waits.read_pause import read_pause
from headrace.services.worker.open_episodes import recorded_waiting

RECENT = 1_000
"""Offsets of each partition that are read: enough for rewards and curves, however old a run is."""
CURVE = 32
"""Characters of the curve of a metric."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run."""

    namespace: str
    recipe: str
    state: str
    reason: str
    paused_at: float | None
    """Since when no process of a run that has not ended runs, in seconds since the epoch."""
    versions: dict[str, int]
    """Newest published version of each policy; -1 before version 0."""
    rewards: dict[str, float | None]
    curves: dict[str, list[float]]
    evaluations: dict[str, object]
    """Results of the newest evaluations, by policy and version."""
    evaluated: dict[str, str]
    """The newest evaluation of each policy, as text."""
    learning: dict[str, list[str]]
    """The figures to steer by, of each policy's newest version, as text."""
    metrics: dict[str, dict[str, list[float]]]
    """The metrics of the newest versions of each policy, by name, the newest last."""
    tasks_submitted: int
    tasks_started: int
    tasks_ended: int
    episodes: int
    failures: int
    """Episodes that failed for good, of the last `failures_of`. The policy is never the cause."""
    failures_of: int
    top_failures: list[str]
    """The most frequent kinds of failures: count, message, and the command that shows one."""
    hints: list[str]
    lags: dict[str, int]
    """Records that each service has not processed yet."""
    dead_letters: int
    """Dead letters that were not redriven."""
    redriven: int
    """Dead letters that were redriven."""
    workers: list[WorkerRow]
    """The inference workers that have reported in the last seconds."""
    env_workers: list[EnvWorkerRow]
    """The env workers that have reported in the last seconds, by environment."""

    def lines(self) -> list[str]:
        """Returns lines for people."""
        why = f" ({self.reason})" if self.reason else ""
        state = self.state if self.paused_at is None else f"{self.state}, paused"
        lines = [f"{self.namespace}: {state}{why}, recipe {self.recipe}"]
        if self.paused_at is not None:
            lines.append(f"  {PAUSED}. {CONTINUE}")
        for name, version in self.versions.items():
            lines.append(policy_line(name, version, self.rewards[name], self.curves[name]))
            lines += self.learning.get(name, ())
            if name in self.evaluated:
                lines.append(f"    evaluated   {self.evaluated[name]}")
        lines += [
            f"  tasks         submitted {self.tasks_submitted:,}   started "
            f"{self.tasks_started:,}   ended {self.tasks_ended:,}",
            f"  episodes      ended {self.episodes:,}   failed {self.failures:,}"
            + (f" of the last {self.failures_of:,}" if self.failures_of < self.episodes else ""),
            "  lag           " + "   ".join(f"{name} {lag:,}" for name, lag in self.lags.items()),
            f"  dead letters  {self.dead_letters:,}"
            + (f"   redriven {self.redriven:,}" if self.redriven else ""),
        ]
        if self.state != "ended":
            lines += worker_lines(self.workers, list(self.versions))
            groups = dict.fromkeys(row.group for row in self.env_workers)
            lines += worker_lines(self.env_workers, list(groups))
        lines += [f"  failed: {line}" for line in self.top_failures]
        return lines + [f"  hint: {line}" for line in self.hints]

    def metric_rows(self) -> list[list[str]]:
        """Returns a row for each metric of each policy: policy, name, newest value and curve."""
        return [
            [policy, name, f"{values[-1]:.4g}", sparkline(_scaled(values), CURVE)]
            for policy, metrics in self.metrics.items()
            for name, values in sorted(metrics.items())
        ]


def _scaled(values: list[float]) -> list[float]:
    """Returns values between 0 and 1, from the lowest to the highest."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


async def run_status_of(log: EventLog, life: RunLife, recent: int = RECENT) -> RunStatus:
    """Reads the status of a run from the last `recent` offsets of each partition.

    Earlier records are counted by their offsets, so a record that was written twice counts twice.
    Leaves no trace.
    """
    recipe, last = life.recipe(), life.ended or life.ending
    progress = Progress(recipe)
    begins = await read_recent(log, progress, recent)
    versions = recipe.stop.reward_versions
    before: Counter[str] = Counter()
    for partition, begin in begins.items():
        before[partition.topic] += begin
    tasks, results = log.topics.name(TASKS), log.topics.name(RESULTS)
    workers, env_workers = await read_workers(log)
    outcomes = (await log.broker.ends(log.topics.partitions_of(OUTCOMES))).values()
    dead_letters, redriven = await count_open(log)
    return RunStatus(
        namespace=log.topics.namespace,
        recipe=recipe.name,
        state=life.state,
        reason="" if last is None else last.reason,
        paused_at=None if life.ended else await read_pause(log),
        versions=progress.versions(),
        rewards={name: policy.reward(versions) for name, policy in progress.policies.items()},
        curves={name: policy.curve() for name, policy in progress.policies.items()},
        evaluations=progress.evaluations.to_tree(),
        evaluated={
            name: f"version {version}   {evaluation}"
            for name in progress.policies
            for version, evaluation in progress.evaluations.of(name).items()
        },
        learning={
            name: [f"    {row.label:<11} {row}" for row in policy.health.rows()]
            for name, policy in progress.policies.items()
        },
        metrics={
            name: {metric: policy.health.curve(metric) for metric in policy.health.newest}
            for name, policy in progress.policies.items()
        },
        tasks_submitted=progress.submitted + before[tasks],
        tasks_started=await _started(log),
        tasks_ended=progress.tasks_ended + before[results],
        # If the earliest results were not read, the episodes are counted by their offsets too.
        episodes=sum(end for _, end in outcomes) if before[results] else progress.episodes,
        failures=progress.failures,
        failures_of=progress.episodes,
        top_failures=[str(kind) for kind in progress.endings.top()],
        hints=progress.hints(),
        lags=await lags(log.broker, log.topics),
        dead_letters=dead_letters,
        redriven=redriven,
        workers=workers,
        env_workers=env_workers,
    )


async def _started(log: EventLog) -> int:
    """Returns how many tasks have been started or refused: those before the scheduler's offset in
    `tasks`, without those that wait according to its newest record."""
    group, partitions = shared_partitions(log.topics, "scheduler")
    assert partitions == [log.topics.partition(TASKS)]
    committed = await log.broker.committed(group, partitions)
    record = await recorded_waiting(log)
    waiting = record.count if record is not None else 0
    return max(0, sum(position.offset for position in committed.values()) - waiting)
