"""Chooses the partition of each prompt, so that work goes to whoever is free. Pure.

Each partition of a policy's prompts belongs to one inference worker, and each worker reports its
partitions, slots and load (decision 33). So to choose a partition is to choose a worker:

- The expected wait at a worker is the mean time of its generations times the prompts that must end
  first, divided by its slots. If it has a free slot, the wait is 0, and the worker with the
  shortest time to drain is best: all that it has, times the mean time, divided by its slots.
- A prompt prefers the worker that has its beginning in the prefix cache: the one that answered the
  last prompt of the conversation, or for a first prompt, the one that the task's samples share.
  With long contexts a cache miss costs much more than a short wait. So the prompt goes there unless
  the wait is longer than at the best worker by STAY_WAIT mean generations or, if the best one has a
  free slot, unless its time to drain is longer by STAY_FREE of them.

A worker that fails prompts answers faster than the others, so its load is low. So after a failure
it is passed over for a while, which doubles with each further failure (AVOIDED_S), as long as
another worker is there.

The load of a worker is what it reported, and what was sent to it and answered by it since. This
agent worker sees only its own prompts, so it counts them several times if there are several agent
workers. Without any report the key decides, as for other topics, and each partition has an owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median

from headrace.schemas.events import GenerationCompleted, GenerationRequested, LoadReported, PoolLoad
from headrace.services.agent.routing.failing_workers import FailingWorkers
from headrace.services.agent.routing.worker_choice import (
    COMPARED,
    MOST_FORGOTTEN,
    partition_for,
    place_in_order,
)
from headrace.services.worker.worker_loads import LONGEST_S, KnownLoad, WorkerLoads

STAY_WAIT = 2.0
"""A prompt stays with its worker if it waits longer there by at most so many generations."""
STAY_FREE = 0.5
"""It stays if another worker is free, and its own needs longer to drain by at most so many."""

_Pair = tuple[str, str]
"""A policy and a worker."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """What a worker would mean for a prompt."""

    wait_s: float
    drain_s: float
    known: KnownLoad[PoolLoad]


class PromptRoutes:
    """The prompts of one agent worker, and what it knows of the inference workers."""

    def __init__(
        self,
        policies: Iterable[str],
        partitions: int,
        agents: Callable[[], float] = lambda: 1.0,
        seed: int = 0,
    ) -> None:
        """`partitions` is their number of a policy's prompts. `agents` estimates how many agent
        workers there are."""
        self.loads = WorkerLoads(policies, partitions)
        self._agents = agents
        self._chance = Random(seed)
        self._sent: Counter[_Pair] = Counter()
        """Prompts that were sent and not answered."""
        self._sent_at_report: dict[_Pair, int] = {}
        self._most = MOST_FORGOTTEN
        self._failing: FailingWorkers[_Pair] = FailingWorkers()
        self._begins_s: float | None = None
        """When all workers that report have done so."""

    def on_report(self, report: LoadReported, now_s: float) -> None:
        """Takes a worker's report, which came at `now_s`."""
        if self._begins_s is None:
            self._begins_s = now_s + min(report.every_ms / 1000, LONGEST_S)
        self.loads.on_report(report, now_s)
        for load in report.pools:
            pair = load.policy, report.worker
            self._sent_at_report[pair] = self._sent[pair]
        if len(self._sent_at_report) > self._most:
            self._forget(now_s)

    def on_answer(self, answer: GenerationCompleted, now_s: float) -> None:
        """Notes whether a worker fails, or works again."""
        pair = answer.policy, answer.worker
        failure = answer.failure
        if failure is None:
            self._failing.on_success(pair)
        elif failure.origin == "infrastructure" and failure.retryable:
            self._failing.on_failure(pair, now_s)
            if len(self._failing) > self._most:
                self._forget(now_s)

    @contextmanager
    def route(
        self, request: GenerationRequested, home: str | None, now_s: float
    ) -> Iterator[int | None]:
        """Yields the partition for a prompt, or None if its key shall decide.

        The prompt counts as load of the partition's owner until the context ends. `home` is the
        worker that answered the conversation's last prompt.
        """
        chosen = self._choose(request, home, now_s)
        if chosen is None:
            yield None
            return
        pair = request.policy, chosen.worker
        self._sent[pair] += 1
        try:
            episode = f"{request.task}/{request.sample}"
            del request  # it may have 100 KiB
            yield partition_for(episode, chosen.partitions, self._sent[pair])
        finally:
            self._sent[pair] -= 1
            if not self._sent[pair]:
                del self._sent[pair]

    def _choose(
        self, request: GenerationRequested, home: str | None, now_s: float
    ) -> KnownLoad[PoolLoad] | None:
        """Returns the worker for a prompt. None if none is known, or if a version is pinned."""
        if request.pinned is not None or self._begins_s is None or now_s < self._begins_s:
            return None
        workers = self._working(request.policy, now_s)
        if len(workers) <= 1:
            return workers[0] if workers else None
        preferred = next((one for one in workers if one.worker == home), None)
        if preferred is None:
            # Each task has an order of the workers of its own. If one goes, the others keep theirs.
            preferred = max(workers, key=lambda one: place_in_order(request.task, one.worker))
        compared = workers
        if len(workers) > COMPARED:
            compared = [*self._chance.sample(workers, COMPARED), preferred]
        typical_s = _typical(compared)
        own = self._expect(preferred, request.policy, typical_s)
        best = min(
            (self._expect(one, request.policy, typical_s) for one in compared),
            key=lambda one: (one.wait_s, one.drain_s),
        )
        stays = own.wait_s <= best.wait_s + STAY_WAIT * typical_s and (
            best.wait_s > 0 or own.drain_s <= best.drain_s + STAY_FREE * typical_s
        )
        return preferred if stays else best.known

    def _working(self, policy: str, now_s: float) -> Sequence[KnownLoad[PoolLoad]]:
        """The workers of a policy that have not failed lately, or all if all have."""
        workers = self.loads.of(policy, now_s)
        if not self._failing:
            return workers
        good = [
            one for one in workers if not self._failing.is_passed_over((policy, one.worker), now_s)
        ]
        return good or workers

    def _expect(self, known: KnownLoad[PoolLoad], policy: str, typical_s: float) -> _Choice:
        load = self._load(known, policy)
        slots = known.load.slots
        each_s = (known.load.run_ms / 1000 or typical_s) / slots
        return _Choice(each_s * max(0.0, load + 1 - slots), each_s * (load + 1), known)

    def _load(self, known: KnownLoad[PoolLoad], policy: str) -> float:
        """How many prompts a worker probably has, in its slots and waiting."""
        pair = policy, known.worker
        own = self._sent[pair]
        since = own - self._sent_at_report.get(pair, 0)
        reported = known.load.busy + known.load.waiting
        return max(own, reported + self._agents() * since)

    def _forget(self, now_s: float) -> None:
        """Forgets workers that have gone."""
        alive = {
            (policy, one.worker)
            for policy in {policy for policy, _ in self._sent_at_report}
            for one in self.loads.of(policy, now_s)
        }
        self._sent_at_report = {
            pair: count for pair, count in self._sent_at_report.items() if pair in alive
        }
        self._failing.keep(alive)
        self._most = 2 * len(alive) + MOST_FORGOTTEN


def _typical(workers: Sequence[KnownLoad[PoolLoad]]) -> float:
    """The median of the workers' mean times of a generation in seconds; 1 if none is known."""
    known = [one.load.run_ms for one in workers if one.load.run_ms]
    return median(known) / 1000 if known else 1.0
