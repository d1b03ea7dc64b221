"""Two versions of a run side by side, and a run beside others, as `headrace compare` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from headrace.errors import UsageError
from headrace.services.base.texts import encodable
from headrace.services.operate.compare.comparison import ComparedRun, Comparison
from headrace.services.operate.dashboard.index.index_rows import EpisodeRow, StepRow, rewards_of
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.cut_texts import Tree
from headrace.services.operate.dashboard.views.run_views import evaluation_tree
from headrace.services.operate.dashboard.views.version_view import histogram

MOST_ITEMS = 100
MOST_POINTS = 300
"""Versions whose metrics are shown: all, or that many at equal distances."""
LAST = 10
"""Versions at the end of a run whose means are shown."""

_Rows = Sequence[tuple[str, EpisodeRow]]


def compare_versions(index: RunIndex, policy: str, first: int, second: int) -> Tree:
    """Returns both versions by the episodes that their batches trained on.

    Raises UsageError if the policy has not both versions.
    """
    for version in (first, second):
        if version not in index.series[policy].rows:
            raise UsageError(f"policy {policy} has no version {version}, or it was not read yet")
    sides = [_rows(index, policy, version) for version in (first, second)]
    by_item: dict[str, list[list[float]]] = {}
    for side, rows in enumerate(sides):
        for item, row in rows:
            if row.reward is not None:
                by_item.setdefault(item, [[], []])[side].append(row.reward)
    items = [
        {
            "item_id": encodable(item),
            "first": _mean_tree(before),
            "second": _mean_tree(after),
            "difference": fmean(after) - fmean(before) if before and after else None,
        }
        for item, (before, after) in by_item.items()
    ]
    items.sort(key=lambda one: -abs(one["difference"] or 0.0))  # type: ignore[arg-type]
    return {
        "kind": "versions",
        "policy": policy,
        "sides": [
            _side(index, policy, version, rows)
            for version, rows in zip((first, second), sides, strict=True)
        ],
        "items": items[:MOST_ITEMS],
    }


def compare_runs(found: Comparison) -> Tree:
    """Returns the metrics of all runs by version, and how each run differs from the first one."""
    versions = sorted({version for run in found.runs for version in run.versions})
    step = max(1, -(-len(versions) // MOST_POINTS))
    shown = versions[::-step][::-1]
    return {
        "kind": "runs",
        "policy": found.policy,
        "notes": [encodable(note) for note in found.notes()],
        "versions": shown,
        "metrics": {
            name: [[_metric(run, version, name) for version in shown] for run in found.runs]
            for name in found.metrics()
        },
        "runs": [_run_tree(found, run) for run in found.runs],
    }


def _metric(run: ComparedRun, version: int, name: str) -> float | None:
    published = run.versions.get(version)
    return None if published is None else published.metrics.get(name)


def _run_tree(found: Comparison, run: ComparedRun) -> Tree:
    last = [run.versions[version] for version in sorted(run.versions)[-LAST:]]
    known = {
        name: [one.metrics[name] for one in last if name in one.metrics] for name in found.metrics()
    }
    return {
        "name": encodable(run.namespace),
        "replay_of": run.replay_of,
        "newest": max(run.versions, default=None),
        "changes": [encodable(change) for change in run.changes],
        "differences": [] if run is found.first else found.differences(run),
        "means": {name: fmean(values) for name, values in known.items() if values},
    }


def _rows(index: RunIndex, policy: str, version: int) -> _Rows:
    return [
        (task.item, episode)
        for task in index.tasks.values()
        for episode in task.samples.values()
        if episode.trained is not None and episode.trained.get(policy) == version
    ]


def _tools(index: RunIndex, policy: str, version: int) -> Tree:
    """Returns how often the version's episodes called each tool, and how often that failed."""
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for task in index.tasks.values():
        trained = {
            sample
            for sample, row in task.samples.items()
            if row.trained is not None and row.trained.get(policy) == version
        }
        for (sample, _, _), step in task.calls.items():
            if sample in trained and isinstance(step, StepRow):
                calls.update(step.tools)
                failed.update(step.tools * step.failed)
    return {
        encodable(name): {"calls": count, "failed": failed[name]}
        for name, count in calls.most_common(MOST_ITEMS)
    }


def _mean_tree(rewards: list[float]) -> Tree:
    return {"reward": fmean(rewards) if rewards else None, "episodes": len(rewards)}


def _side(index: RunIndex, policy: str, version: int, rows: _Rows) -> Tree:
    series, episodes = index.series[policy], [row for _, row in rows]
    attempts = [row.attempt for row in episodes if row.attempt is not None]
    result = index.progress.evaluations.of(policy).get(version)
    metrics = {name: series.value(version, name) for name in series.names()}
    return {
        "name": f"version {version}",
        "version": version,
        "metrics": {name: value for name, value in metrics.items() if value is not None},
        "rewards": histogram(rewards_of(episodes)),
        "endings": dict(Counter(row.ending for row in episodes).most_common()),
        "failures": dict(Counter(row.origin for row in episodes if row.origin).most_common()),
        "tools": _tools(index, policy, version),
        "tokens_mean": fmean(one.tokens for one in attempts) if attempts else None,
        "turns_mean": fmean(one.turns for one in attempts) if attempts else None,
        "seconds_mean": fmean(row.seconds for row in episodes) if episodes else None,
        "episodes": len(episodes),
        "evaluation": evaluation_tree(version, result),
    }
