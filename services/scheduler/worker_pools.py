"""Whether the workers of a policy and of an environment can take more, as far as they report. Pure.

It fails closed: nothing starts for a policy or an environment from which no worker has reported in
the last seconds.

A worker's prompts are known from its last report. What has started since then is counted beside it.
A new scheduler does not count what its predecessor has started: if episodes are live, it begins to
start when workers report to it, and they report all that has reached them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from headrace.schemas.events import LoadReported
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.worker.worker_loads import (
    LONGEST_S,
    MOST_WORKERS,
    SUSPECT_AFTER,
    EnvironmentLoads,
    WorkerLoads,
)

UNDER_WAY_S = 0.25
"""A start needs about so long until its prompt is at a worker, and a report until it is here."""


class _Starts:
    """The newest starts of one policy. A report of one worker says nothing about those that went to
    another one, so each start counts until all workers have reported again."""

    def __init__(self) -> None:
        self._newest: deque[tuple[float, int]] = deque()
        """When, and how many episodes."""
        self._episodes = 0

    def add(self, episodes: int, now_s: float) -> None:
        """Notes that episodes start."""
        self._newest.append((now_s, episodes))
        self._episodes += episodes

    def count(self, seconds: float, now_s: float) -> int:
        """Returns how many episodes have started in the last seconds, and forgets the others."""
        # If the clock was set back, a start in the future would count for too long.
        while self._newest and not now_s - seconds < self._newest[0][0] <= now_s:
            self._episodes -= self._newest.popleft()[1]
        return self._episodes


class WorkerPools:
    """The workers of each policy, and of each environment that is not another team's."""

    def __init__(self, recipe: Recipe) -> None:
        self._limits = recipe.scheduler
        self._policies = tuple(recipe.policies)
        self._loads = WorkerLoads(self._policies, recipe.pool_partitions)
        own = (key for key, one in recipe.environments.items() if not one.external)
        self._environments = tuple(own)
        partitions = max(recipe.pool_partitions, recipe.partitions)  # of `actions`
        self._env_loads = EnvironmentLoads(self._environments, partitions)
        self._starts: defaultdict[str, _Starts] = defaultdict(_Starts)
        self._early: dict[str, tuple[LoadReported, float]] = {}
        """The newest report of each worker before `on_begun`, and when it came."""
        self._now_s = 0.0
        """When it was asked last."""

    def on_report(self, report: LoadReported, now_s: float, early_s: float | None = None) -> None:
        """Takes a worker's report, which came at `now_s`.

        A report that is read while the scheduler catches up came at `early_s`.
        """
        if early_s is not None:
            self._early.pop(report.worker, None)
            self._early[report.worker] = report, early_s
            if len(self._early) > MOST_WORKERS:
                del self._early[next(iter(self._early))]
            return
        self._loads.on_report(report, now_s)
        self._env_loads.on_report(report, now_s)

    def on_begun(self, now_s: float, *, is_first: bool) -> None:
        """Takes the early reports that are recent, so that the first starts of a run need not wait.

        `is_first` says that no episode is live. If a predecessor has started some, reports from
        before do not count them, so they are dropped.
        """
        early, self._early = self._early, {}
        for report, early_s in early.values() if is_first else ():
            age_s = max(0.0, now_s - early_s)
            if age_s < SUSPECT_AFTER * min(report.every_ms / 1000, LONGEST_S):
                self.on_report(report, now_s - age_s)

    def on_started(self, policies: Iterable[str], episodes: int) -> None:
        """Notes that episodes start, for which `take_more` was just asked."""
        for policy in policies:
            self._starts[policy].add(episodes, self._now_s)

    def take_more(self, policies: Iterable[str], environment: str | None, now_s: float) -> bool:
        """Returns whether a task may start in which these policies play in this environment."""
        self._now_s = now_s
        return self._runs(environment, now_s) and all(
            self._takes_more(policy, now_s) for policy in policies
        )

    def silent(self, now_s: float) -> list[str]:
        """Returns the keys of the policies and environments for which nothing starts, because no
        worker of theirs reports."""
        if not self._limits.require_reports:
            return []
        silent = [name for name in self._policies if not self._loads.is_served(name, now_s)]
        still = [name for name in self._environments if not self._runs(name, now_s)]
        return [f"policies.{name}" for name in silent] + [f"environments.{name}" for name in still]

    def _runs(self, environment: str | None, now_s: float) -> bool:
        """Whether an env worker runs this environment, as far as that must be known.

        How busy it is does not count: an episode may wait for a slot, and has limits of its own.
        """
        if environment not in self._environments or not self._limits.require_reports:
            return True
        return self._env_loads.is_served(environment, now_s)

    def _takes_more(self, policy: str, now_s: float) -> bool:
        unreported_s = self._loads.longest_s(policy, now_s) + UNDER_WAY_S
        started = self._starts[policy].count(unreported_s, now_s)
        if not self._loads.is_served(policy, now_s):
            return not self._limits.require_reports
        waiting = self._loads.waiting_per_slot(policy, now_s, started)
        return waiting <= self._limits.waiting_per_slot
