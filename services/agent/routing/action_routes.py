"""Chooses the partition of `actions` for a new environment or a score: whoever is free. Pure.

Each partition of `actions` belongs to one env worker, and each worker reports its partitions, slots
and load (decision 35). So to choose a partition is to choose a worker. An environment keeps its
partition: all later actions of its attempt go there.

- The best worker is the one where a slot is free soonest, and of those with a free slot, the one
  that has the smallest share of its slots in use. A slow worker's environments stay open for
  longer, so this gives it fewer of them.
- Of the workers that are about as good as the best one (NEAR), each task prefers one, so that the
  samples of a task share images and other things that are on a host.
- A new attempt avoids the workers of the attempts before it, and a worker that fails is passed over
  for a while, as long as another worker is there.

Without reports of an environment there is no choice: the caller has a partition for this case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from headrace.schemas.events import (
    ActionRequested,
    EnvironmentLoad,
    LoadReported,
    ObservationRecorded,
)
from headrace.services.agent.routing.failing_workers import FailingWorkers
from headrace.services.agent.routing.worker_choice import (
    COMPARED,
    MOST_FORGOTTEN,
    partition_for,
    place_in_order,
)
from headrace.services.worker.worker_loads import LONGEST_S, EnvironmentLoads, KnownLoad

NEAR = 1 / 16, 1 / 64
"""A worker is about as good as the best one if the share of its slots in use is greater by at most
so much of that share, and so much of all slots."""
NOT_ITS_FAULT = frozenset({"sandbox_lost", "superseded", "diverged"})
"""Failures that a worker reports about what another worker had begun."""


@dataclass(frozen=True, slots=True)
class Location:
    """The worker that gets an action, and the partition for it."""

    worker: str
    partition: int


class ActionRoutes:
    """What one agent worker knows of the env workers."""

    def __init__(
        self,
        environments: Iterable[str],
        partitions: int,
        agents: Callable[[], float] = lambda: 1.0,
        seed: int = 0,
    ) -> None:
        """`partitions` is their number of `actions`. `agents` estimates how many agent workers
        there are."""
        self._names = tuple(environments)
        self._loads = EnvironmentLoads(self._names, partitions)
        self._agents = agents
        self._chance = Random(seed)
        self._since: Counter[tuple[str, str]] = Counter()
        """Environment and worker, to the resets and scores that were sent there since the worker's
        last report, less the environments that were closed."""
        self._most = MOST_FORGOTTEN
        self._failing: FailingWorkers[str] = FailingWorkers()
        self._begins_s: float | None = None
        """When all workers that report have done so."""

    def on_report(self, report: LoadReported, now_s: float) -> None:
        """Takes a worker's report, which came at `now_s`."""
        if self._begins_s is None:
            self._begins_s = now_s + min(report.every_ms / 1000, LONGEST_S)
        self._loads.on_report(report, now_s)
        for load in report.environments:
            self._since.pop((load.environment, report.worker), None)
        if len(self._since) > self._most:
            alive = {(name, worker) for name in self._names for worker in self._alive(now_s)}
            self._since = Counter({pair: n for pair, n in self._since.items() if pair in alive})
            self._most = 2 * len(alive) + MOST_FORGOTTEN

    def on_answer(self, answer: ObservationRecorded, now_s: float) -> None:
        """Notes whether a worker fails, or works again."""
        failure = answer.failure
        if failure is None:
            self._failing.on_success(answer.instance)
        elif (
            failure.origin == "infrastructure"
            and failure.retryable
            and failure.code not in NOT_ITS_FAULT
        ):
            self._failing.on_failure(answer.instance, now_s)
            if len(self._failing) > MOST_FORGOTTEN:
                self._failing.keep(self._alive(now_s))

    def on_close(self, environment: str, worker: str) -> None:
        """Notes that an environment of a worker is closed."""
        self._since[environment, worker] -= 1

    def choose(
        self, action: ActionRequested, avoided: Collection[str], now_s: float
    ) -> Location | None:
        """Returns the location of a reset or a score, and counts it as load of the worker.

        None if no worker is known for it. `avoided` are workers that should not get it.
        """
        name = action.environment.use
        if self._begins_s is None or now_s < self._begins_s:
            return None
        workers = self._loads.of(name, now_s)
        if not workers:
            return None
        chosen = self._best(self._able(workers, avoided, now_s), action)
        self._since[name, chosen.worker] += 1
        episode = f"{action.task}/{action.sample}"
        partition = partition_for(episode, chosen.partitions, self._load(chosen))
        return Location(chosen.worker, partition)

    def _alive(self, now_s: float) -> set[str]:
        return {one.worker for name in self._names for one in self._loads.of(name, now_s)}

    def _able(
        self, workers: Sequence[KnownLoad[EnvironmentLoad]], avoided: Collection[str], now_s: float
    ) -> Sequence[KnownLoad[EnvironmentLoad]]:
        """The workers that are neither avoided nor failing, or the closest to that."""
        if not avoided and not self._failing:
            return workers
        passed = self._failing.is_passed_over
        good = [one for one in workers if not passed(one.worker, now_s)] or list(workers)
        return [one for one in good if one.worker not in avoided] or good

    def _best(
        self, workers: Sequence[KnownLoad[EnvironmentLoad]], action: ActionRequested
    ) -> KnownLoad[EnvironmentLoad]:
        if len(workers) > COMPARED:
            preferred = max(workers, key=lambda one: place_in_order(action.task, one.worker))
            workers = (*self._chance.sample(workers, COMPARED), preferred)
        known = [one.load.open_ms for one in workers if one.load.open_ms]
        typical_ms = median(known) if known else 1.0
        found = [(self._wait(one, typical_ms), self._used(one), one) for one in workers]
        wait, used, _ = min(found, key=lambda one: one[:2])
        most = used * (1 + NEAR[0]) + NEAR[1]
        near = [one for its_wait, its, one in found if its_wait <= wait and its <= most]
        return max(near, key=lambda one: place_in_order(action.task, one.worker))

    def _wait(self, known: KnownLoad[EnvironmentLoad], typical_ms: float) -> float:
        """How long one more probably waits for a slot, in milliseconds."""
        load = known.load
        behind = max(0.0, self._load(known) + 1 - load.slots)
        return behind * (load.open_ms or typical_ms) / load.slots

    def _used(self, known: KnownLoad[EnvironmentLoad]) -> float:
        """The share of the slots that would be in use with one more."""
        return (self._load(known) + 1) / known.load.slots

    def _load(self, known: KnownLoad[EnvironmentLoad]) -> float:
        """How many a worker probably has, in its slots and waiting."""
        load = known.load
        since = self._since[load.environment, known.worker]
        return max(0.0, load.busy + load.waiting + self._agents() * since)
