"""Whether the workers of a policy and of an environment can take more, as far as they report. Pure.

It fails closed: nothing starts for a policy or an environment from which no worker has reported in
the last seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.schemas.events import LoadReported
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.worker.worker_loads import EnvironmentLoads, WorkerLoads


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
        self._started: Counter[str] = Counter()
        """By policy: the episodes that have started since the last report."""

    def on_report(self, report: LoadReported, now_s: float) -> None:
        """Takes a worker's report, which came at `now_s`."""
        self._loads.on_report(report, now_s)
        self._env_loads.on_report(report, now_s)
        for load in report.pools:
            self._started.pop(load.policy, None)

    def on_started(self, policies: Iterable[str], episodes: int) -> None:
        """Notes that episodes start, whose prompts no report counts yet."""
        for policy in policies:
            self._started[policy] += episodes

    def take_more(self, policies: Iterable[str], environment: str | None, now_s: float) -> bool:
        """Returns whether a task may start in which these policies play in this environment."""
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
        if not self._loads.is_served(policy, now_s):
            return not self._limits.require_reports
        waiting = self._loads.waiting_per_slot(policy, now_s, self._started[policy])
        return waiting <= self._limits.waiting_per_slot
