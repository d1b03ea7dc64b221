"""The page of a run, its curves, its tools, and what it discarded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.services.base.clock import now
from headrace.services.base.texts import encodable
from headrace.services.operate.dashboard.index.index_follower import IndexFollower
from headrace.services.operate.dashboard.index.index_rows import DiscardedRow
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.index.version_series import VersionSeries
from headrace.services.operate.dashboard.views.cut_texts import Tree
from headrace.services.operate.dashboard.views.kept_list import KeptList
from headrace.services.operate.dashboard.views.page_of import bounded, page_of, whole_number
from headrace.services.operate.evaluation import EvaluationResult

WINDOW_S = 60.0
"""Seconds over which rates are averaged."""
TOP_FAILURES = 20
MOST_DISCARDED = 100_000
POINTS = 300
MOST_POINTS = 2_000
BUCKETS = 120


def policy_of(index: RunIndex, query: Mapping[str, str]) -> str:
    """Returns the policy that a request means. Raises UsageError if it is not clear."""
    name = query.get("policy", "")
    if name in index.series:
        return name
    trained = [one for one in index.series if index.progress.policies[one].trained]
    if not name and len(trained or index.series) == 1:
        return (trained or list(index.series))[0]
    names = ", ".join(index.series)
    raise UsageError(f"policy={name[:80]!r}: name one of the run's policies: {names}")


def run_tree(namespace: str, follower: IndexFollower) -> Tree:
    """Returns the overview of a run."""
    index, life, at = follower.index, follower.life, now()
    progress = index.progress
    last = life.ended or life.ending
    return {
        "namespace": namespace,
        "recipe": index.recipe.name,
        "state": life.state,
        "reason": "" if last is None else encodable(last.reason),
        "started_at": life.started_at or None,
        "ended_at": (index.last_end_at or None) if life.ended is not None else None,
        "now": at,
        "index": _index_tree(follower),
        "policies": [_policy_tree(index, name) for name in index.series],
        "tasks": {"submitted": progress.submitted, "ended": progress.tasks_ended},
        "episodes": {
            "started": index.started,
            "ended": index.ended,
            "live": max(0, index.started - index.ended),
            "failed": progress.failures,
            "evaluation": index.evaluated,
            "tokens": index.tokens,
        },
        "rates": _rates(index, at),
        "lags": follower.lags,
        "lags_problem": follower.lags_problem,
        "dead_letters": index.dead_letters.waiting,
        "failures": _failure_trees(index),
        "endings": dict(index.endings.most_common()),
        "discarded": _discarded_counts(index),
        "hints": progress.hints(),
    }


def _index_tree(follower: IndexFollower) -> Tree:
    return {
        "done": follower.done,
        "total": follower.total,
        "caught_up": follower.caught_up.is_set(),
        "seconds": follower.seconds,
        "as_of": follower.newest_at if follower.resting else None,
        "problem": follower.problem,
        "forgotten_tasks": follower.index.forgotten,
        "undecodable": follower.undecodable,
    }


def _failure_trees(index: RunIndex) -> list[Tree]:
    """The most frequent failures, with one episode of each."""
    most = sorted(index.failures.items(), key=lambda item: -item[1][0])[:TOP_FAILURES]
    return [
        {
            "origin": origin,
            "code": encodable(code),
            "count": count,
            "message": encodable(message),
            "task": task,
            "sample": sample,
        }
        for (origin, code), (count, message, task, sample) in most
    ]


def _policy_tree(index: RunIndex, name: str) -> Tree:
    series, progress = index.series[name], index.progress.policies[name]
    newest = series.newest
    results = index.progress.evaluations.of(name)
    newest_measured = max((version for version, one in results.items() if one.rewards), default=-1)
    row = series.rows.get(newest)
    return {
        "name": name,
        "trained": progress.trained,
        "version": newest if newest >= 0 else None,
        "published_at": row.published_at if row is not None else None,
        "reward": series.value(newest, "reward"),
        "staleness": progress.staleness,
        "skipped": progress.skipped,
        "evaluation": evaluation_tree(newest_measured, results.get(newest_measured)),
    }


def evaluation_tree(version: int, result: EvaluationResult | None) -> Tree | None:
    """Returns the evaluation of a version with its 95 % intervals. None if no sample counts yet."""
    if result is None or not result.rewards:
        return None
    return {"version": version, **result.to_tree()}


def _rates(index: RunIndex, at: float) -> Tree:
    episodes, tokens = index.by_time.recent(at - WINDOW_S)
    return {
        "window_s": WINDOW_S,
        "episodes_per_s": episodes / WINDOW_S,
        "tokens_per_s": tokens / WINDOW_S,
    }


def _discarded_counts(index: RunIndex) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in index.discarded.reasons():
        counts[row["reason"]] += row["count"]
    return dict(counts.most_common())


def series_tree(index: RunIndex, query: Mapping[str, str]) -> Tree:
    """Returns curves by version, shortened to `points`."""
    policy = policy_of(index, query)
    series = index.series[policy]
    known = series.names()
    wanted = {one for one in query.get("names", "").split(",") if one} or set(known)
    points = whole_number(query, "points", POINTS, 1, MOST_POINTS)
    first = whole_number(query, "from", 0)
    last = whole_number(query, "to", -1, -1)
    results = [
        (version, result)
        for version, result in index.progress.evaluations.of(policy).items()
        if version >= first and (last < 0 or version <= last) and result.rewards
    ]
    tree = series.series([one for one in known if one in wanted], points, first, last=_last(last))
    return tree | {
        "names_known": known,
        "evaluation": [evaluation_tree(*one) for one in results[-MOST_POINTS:]],
    }


def _last(last: int) -> int | None:
    return None if last < 0 else last


def version_row(series: VersionSeries, version: int) -> Tree:
    """Returns a version in a list."""
    row, value = series.rows[version], series.value
    count = {name: value(version, name) for name in ("samples", "dropped", "tokens", "staleness")}
    return {
        "version": version,
        "status": row.status,
        "at": row.published_at or None,
        "reward": value(version, "reward"),
        **{name: None if one is None else int(one) for name, one in count.items()},
        "wait_s": value(version, "wait_s"),
        "step_s": value(version, "step_s"),
        "metrics": {
            name: one
            for name in ("loss", "grad_norm", "entropy", "kl", "importance_mean", "clip_fraction")
            if (one := value(version, name)) is not None
        },
    }


def times_tree(follower: IndexFollower, query: Mapping[str, str]) -> Tree:
    """Returns what happened by time, in equal buckets from the first event to now."""
    index = follower.index
    count = whole_number(query, "points", BUCKETS, 1, MOST_POINTS)
    begin = index.first_at or now()
    end = max(index.last_end_at if follower.life.ended is not None else now(), begin + 1.0)
    step = (end - begin) / count
    services = dict.fromkeys(name for _, lags in follower.past_lags for name in lags)
    return {
        "from": begin,
        "to": end,
        "step_s": step,
        "at": [begin + number * step for number in range(count)],
        **index.by_time.curves(begin, step, count),
        "lag": {
            "at": [at for at, _ in follower.past_lags],
            "services": {
                name: [lags.get(name) for _, lags in follower.past_lags] for name in services
            },
        },
    }


def discarded_rows(index: RunIndex, query: Mapping[str, str]) -> list[DiscardedRow]:
    """Returns what was not trained on, the newest first."""
    policy, reason = query.get("policy") or None, query.get("reason") or None
    return bounded(index.discarded.rows(policy, reason), MOST_DISCARDED)


def discarded_tree(index: RunIndex, kept: KeptList[DiscardedRow], query: Mapping[str, str]) -> Tree:
    """Returns one page of what was not trained on, and all reasons."""
    policy = query.get("policy") or None
    reasons = [one for one in index.discarded.reasons() if policy in (None, one["policy"])]
    page = page_of(kept.rows(index, query), query, _discarded_row)
    return {"reasons": reasons[:1_000], **page}


def _discarded_row(row: DiscardedRow) -> Tree:
    return {
        "policy": row.policy,
        "reason": encodable(row.reason),
        "kind": row.kind,
        "task": row.task,
        "sample": row.sample,
        "version": row.version,
        "at": row.at,
    }


def tools_tree(index: RunIndex, query: Mapping[str, str]) -> Tree:
    """Returns how often each tool was called and how often it failed, most failures first."""
    rows = sorted(index.tools.items(), key=lambda item: (-item[1].failed, -item[1].calls, item[0]))

    def to_tree(item: tuple[str, Any]) -> Tree:
        name, row = item
        return {
            "tool": encodable(name),
            "calls": row.calls,
            "failed": row.failed,
            "share": row.failed / row.calls if row.calls else 0.0,
            "seconds_mean": row.seconds / row.calls if row.calls else 0.0,
            "example": row.example and {"task": row.example[0], "sample": row.example[1]},
        }

    return page_of(rows, query, to_tree)
