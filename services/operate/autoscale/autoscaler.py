"""Decides how many inference workers a run needs, from versions and load reports. Pure.

A decision follows from a window: all versions whose making began after the workers last changed,
once they make up `window_s` of the trainer's time. So nothing is decided while a new worker loads
its model, and each decision rests on the pool as it is.

What the trainer waits for may be something else than inference: environments, the limit of live
episodes, or staleness. Then prompts don't wait for slots, and more workers would be idle. So a pool
grows at most to the number of workers that its prompts could keep busy. It never shrinks while the
trainer waits: with fewer prompts at once, an engine answers each of them sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.schemas.events import LoadReported, PolicyPublished, PoolLoad
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.worker_settings import Autoscale
from headrace.services.operate.autoscale.scaling_rule import (
    STARVED,
    fill,
    scale_by_load,
    scale_by_wait,
)
from headrace.services.worker.worker_loads import KnownLoad, WorkerLoads

NEAR = 0.1
"""A pool of which at most this share is missing is measured as if it were complete."""
LISTEN_S = 5.0
"""After this time every worker has reported."""


@dataclass(frozen=True)
class Scaling:
    """How many workers are wanted, and why."""

    wanted: int
    workers: int
    """Workers that report and are not leaving."""
    reason: str
    wait: float | None = None
    """The share of its time for which the trainer waits for batches; None if it is not known."""
    busy: float | None = None
    """The share of the slots that is in use."""
    used: float | None = None
    """The share of what the workers can produce that is trained on."""
    heard: bool = True
    """Whether every worker has had time to report."""


@dataclass
class _Window:
    """What was measured since the workers changed."""

    since_s: float
    waited_s: dict[str, float] = field(default_factory=dict)
    """By policy."""
    trained_s: dict[str, float] = field(default_factory=dict)
    groups: float = 0.0
    stale: float = 0.0
    looks: int = 0
    busy: float = 0.0
    load: float = 0.0

    def seconds(self) -> float:
        """The trainer's time that the versions make up, of the policy with the least."""
        return min((self.waited_s[one] + self.trained_s[one] for one in self.waited_s), default=0.0)

    def wait(self) -> float:
        """The share of waiting of the policy that waits most."""
        total = {one: self.waited_s[one] + self.trained_s[one] for one in self.waited_s}
        return max((self.waited_s[one] / total[one] for one in total if total[one]), default=0.0)

    def busy_share(self) -> float:
        return self.busy / self.looks if self.looks else 0.0

    def used(self) -> float:
        """Busy slots, without the share of their work that got too stale."""
        produced = self.groups + self.stale
        return self.busy_share() * (self.groups / produced if produced else 1.0)


class Autoscaler:
    """Folds the log of one run. All times are in seconds of one clock."""

    def __init__(
        self, recipe: Recipe, settings: Autoscale, now_s: float, workers: int | None = None
    ) -> None:
        """`workers` is the number that was started; None takes what reports first."""
        self._settings = settings
        self._trained = {
            name for name, policy in recipe.policies.items() if policy.training is not None
        }
        self._policies = tuple(recipe.policies)
        self._loads = WorkerLoads(self._policies, recipe.pool_partitions)
        self._first = recipe.workers.inference
        self._wanted = workers
        self._changed_s = self._begun_s = now_s
        self._complete = False
        """Whether the wanted workers have reported since the last change."""
        self._window = _Window(now_s)

    def on_published(self, event: PolicyPublished, at_s: float) -> None:
        """Adds a version that was published at `at_s`."""
        window, name = self._window, event.policy
        began_s = at_s - event.wait_s - event.step_s
        counts = name in self._trained and event.status in ("trained", "skipped")
        if not counts or not self._complete or began_s < window.since_s:
            return
        window.waited_s[name] = window.waited_s.get(name, 0.0) + event.wait_s
        window.trained_s[name] = window.trained_s.get(name, 0.0) + event.step_s
        window.groups += event.metrics.get("groups", 0.0)
        window.stale += event.metrics.get("dropped_groups_stale", 0.0)

    def on_report(self, event: LoadReported, now_s: float) -> None:
        """Adds a worker's report, which came at `now_s`."""
        self._loads.on_report(event, now_s)

    def decide(self, now_s: float) -> Scaling:
        """Returns how many workers are wanted now. Call it about once in a second."""
        known = list(self._known(now_s))
        workers = len({one.worker for one in known})
        if self._wanted is None:
            if not workers or now_s < self._begun_s + LISTEN_S:
                why = "reports are awaited" if workers else "no worker reports"
                first = self._bounded(workers or self._first)
                return Scaling(first, workers, why, heard=False)
            self._restart(workers, now_s)
        assert self._wanted is not None
        if abs(workers - self._wanted) > NEAR * self._wanted:
            return self._wait_for_workers(workers, now_s)
        if not self._complete:
            self._complete, self._window = True, _Window(now_s)
        self._look(known, now_s)
        return self._judge(workers, now_s)

    def _known(self, now_s: float) -> Iterable[KnownLoad[PoolLoad]]:
        for policy in self._policies:
            yield from self._loads.alive(policy, now_s)

    def _look(self, known: Iterable[KnownLoad[PoolLoad]], now_s: float) -> None:
        loads = [one.load for one in known]
        slots = sum(one.slots for one in loads)
        if slots:
            self._window.looks += 1
            self._window.busy += min(1.0, sum(one.busy for one in loads) / slots)
            self._window.load += sum(one.busy + one.waiting for one in loads) / slots

    def _wait_for_workers(self, workers: int, now_s: float) -> Scaling:
        assert self._wanted is not None
        if self._complete:  # A worker has died, or somebody else starts and ends them.
            self._complete, self._changed_s = False, now_s
        if now_s >= self._changed_s + self._settings.start_s:
            self._restart(workers, now_s)
            wanted = self._bounded(workers)
            return self._change(wanted, now_s, Scaling(wanted, workers, "workers did not come"))
        return Scaling(self._wanted, workers, f"{workers} of {self._wanted} workers report")

    def _judge(self, workers: int, now_s: float) -> Scaling:
        assert self._wanted is not None
        window = self._window
        seconds = window.seconds() if self._trained else now_s - window.since_s
        if self._trained - window.waited_s.keys() or seconds < self._settings.window_s:
            reason = f"measured {seconds:.0f} of {self._settings.window_s:g} s"
            return Scaling(self._wanted, workers, reason)
        # The count that was measured may differ a little from the wanted one.
        if not self._trained:
            load = window.load / window.looks
            wanted, reason = scale_by_load(self._wanted, load), f"{load:.2f} prompts for each slot"
            found = Scaling(self._bounded(wanted), workers, reason, busy=window.busy_share())
            return self._change(found.wanted, now_s, found)
        wait, busy, used = window.wait(), window.busy_share(), window.used()
        wanted = scale_by_wait(self._wanted, wait, used)
        reason = f"trainers wait {wait:.0%}, {used:.0%} of the pool is used"
        most = max(self._wanted, fill(self._wanted, window.load / window.looks))
        if wait > STARVED and wanted > most:
            wanted = most
            reason += (
                f", and prompts could keep {most} workers busy. If trainers wait then, look at "
                "environments, scheduler.live_episodes and batches.max_staleness"
            )
        found = Scaling(self._bounded(wanted), workers, reason, wait, busy, used)
        return self._change(found.wanted, now_s, found)

    def _change(self, wanted: int, now_s: float, found: Scaling) -> Scaling:
        self._restart(wanted, now_s)
        return found

    def _restart(self, wanted: int, now_s: float) -> None:
        """Begins a new window. If the number changes, it begins once the workers have changed."""
        self._complete = self._complete and wanted == self._wanted
        self._wanted, self._changed_s = wanted, now_s
        self._window = _Window(now_s)

    def _bounded(self, workers: int) -> int:
        return min(self._settings.most, max(self._settings.least, workers))
