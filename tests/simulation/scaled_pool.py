"""A trainer and a pool of inference workers whose load changes, in virtual time. No Kafka.

The real Autoscaler decides from the events that a real run would record. The figures are about
those of a model of 8B: 128 slots for each worker, episodes of minutes, 60 s of training for a batch
of 32 groups of 8 samples, and two minutes until a new worker has loaded the model. A group starts
if the staleness bound leaves room for it, as in the scheduler.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from headrace.schemas import packed
from headrace.schemas.events import LoadReported, PolicyPublished, PoolLoad
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.autoscale.autoscaler import Autoscaler, Scaling

STEP_S = 10.0


@dataclass(frozen=True)
class Load:
    """What is simulated."""

    episode_s: Callable[[float], float]
    """The mean time of an episode in a slot, by the time at which it starts."""
    workers: int = 6
    """At the start, and all the time if nothing scales."""
    scaled: tuple[int, int] | None = None
    """The bounds of autoscaling; None for a fixed pool."""
    seconds: float = 10 * 3600.0
    slots: int = 128
    samples: int = 8
    groups: int = 32
    live: int = 4000
    """Most episodes that run at the same time."""
    staleness: int = 12
    train_s: float = 60.0
    load_s: float = 120.0
    """Until a new worker serves."""
    outside_s: float = 0.0
    """Mean time of an episode outside of the slots, in its environment."""
    seed: int = 0


@dataclass
class Result:
    versions: int = 0
    worker_hours: float = 0.0
    waited_s: float = 0.0
    pool: list[int] = field(default_factory=list)
    """The wanted number of workers, each time that it changed."""
    decisions: list[Scaling] = field(default_factory=list)
    """One for each window."""


@dataclass
class Worker:
    name: str
    serves_s: float
    leaving: bool = False
    busy: int = 0


def recipe_of(load: Load) -> Recipe:
    least, most = load.scaled or (load.workers, load.workers)
    scale = {"least": least, "most": most, "window_s": 600.0, "start_s": 900.0}
    return parse_recipe(
        {
            "name": "scaled",
            "pool_partitions": 64,
            "workers": {"inference": load.workers, "autoscale": scale},
            "policies": {"p": {"model": "tiny-llama", "training": {}}},
            "tasks": {"roles": {"policy": "p"}},
        },
        "the simulation",
    )


class Simulation:
    """Runs a load."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._chance = Random(load.seed)
        self._result = Result()
        recipe = recipe_of(load)
        assert recipe.workers.autoscale is not None
        self._scaler = Autoscaler(recipe, recipe.workers.autoscale, 0.0, load.workers)
        self._workers = [Worker(str(n), 0.0) for n in range(load.workers)]
        self._made = load.workers
        self._waiting: deque[int] = deque()
        """Groups of episodes that wait for a slot."""
        self._ends: list[tuple[float, int, Worker | None, int]] = []
        """When an episode leaves its slot, or ends outside of it; its number and group."""
        self._left: Counter[int] = Counter()
        """Episodes of a group that have not ended."""
        self._done = 0
        """Groups that are complete and in no batch."""
        self._started = self._number = self._batches = self._live = 0
        self._wanted = load.workers
        self._free_s = self._idle_since = 0.0
        """When the trainer ends its batch; since when it waits."""
        self._training: tuple[float, float] | None = None
        """The wait before the batch that is trained, and when its training began."""

    def run(self) -> Result:
        now_s = 0.0
        while now_s < self._load.seconds:
            self._start_groups()
            self._fill_slots(now_s)
            self._end_episodes(now_s)
            self._train(now_s)
            self._scale(now_s)
            self._result.worker_hours += len(self._workers) * STEP_S / 3600
            now_s += STEP_S
        return self._result

    def _start_groups(self) -> None:
        load = self._load
        # Published versions are as many as batches that are trained.
        room = (self._result.versions + load.staleness + 1) * load.groups - self._started
        while room > 0 and self._live + load.samples <= load.live:
            self._left[self._started] = load.samples
            self._waiting.extend([self._started] * load.samples)
            self._started += 1
            self._live += load.samples
            room -= 1

    def _fill_slots(self, now_s: float) -> None:
        ready = [one for one in self._workers if not one.leaving and one.serves_s <= now_s]
        while self._waiting and ready:
            worker = min(ready, key=lambda one: one.busy)
            if worker.busy >= self._load.slots:
                return
            worker.busy += 1
            mean_s = self._load.episode_s(now_s)
            seconds = mean_s * self._chance.lognormvariate(-0.125, 0.5)
            self._push(now_s + seconds, worker, self._waiting.popleft())

    def _push(self, at_s: float, worker: Worker | None, group: int) -> None:
        self._number += 1
        heapq.heappush(self._ends, (at_s, self._number, worker, group))

    def _end_episodes(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, _, worker, group = heapq.heappop(self._ends)
            if worker is not None:
                worker.busy -= 1
                if self._load.outside_s:
                    outside_s = self._chance.expovariate(1 / self._load.outside_s)
                    self._push(now_s + outside_s, None, group)
                    continue
            self._live -= 1
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                self._done += 1

    def _train(self, now_s: float) -> None:
        if self._training is not None and now_s >= self._free_s:
            wait_s, began_s = self._training
            self._training, self._idle_since = None, now_s
            self._result.versions += 1
            self._scaler.on_published(
                PolicyPublished(
                    policy="p",
                    version=self._result.versions,
                    status="trained",
                    digest=bytes(32),
                    full_version=0,
                    wait_s=wait_s,
                    step_s=now_s - began_s,
                    metrics={"groups": float(self._load.groups)},
                ),
                now_s,
            )
        if self._training is None and self._done >= self._load.groups:
            self._done -= self._load.groups
            wait_s = now_s - self._idle_since
            self._result.waited_s += wait_s
            self._training = wait_s, now_s
            self._free_s = now_s + self._load.train_s

    def _scale(self, now_s: float) -> None:
        self._workers = [one for one in self._workers if not one.leaving or one.busy]
        if self._load.scaled is None:
            return
        for worker in self._workers:
            if worker.serves_s <= now_s:
                self._report(worker, now_s)
        found = self._scaler.decide(now_s)
        if found.wait is not None:
            self._result.decisions.append(found)
        if found.wanted != self._wanted:
            self._wanted = found.wanted
            self._result.pool.append(found.wanted)
        serving = [one for one in self._workers if not one.leaving]
        for worker in serving[self._wanted :]:
            worker.leaving = True
        for _ in range(self._wanted - len(serving)):
            self._workers.append(Worker(str(self._made), now_s + self._load.load_s))
            self._made += 1

    def _report(self, worker: Worker, now_s: float) -> None:
        load = PoolLoad(
            policy="p",
            partitions=packed.pack_i32([0]),
            slots=self._load.slots,
            busy=worker.busy,
            waiting=len(self._waiting) // max(1, len(self._workers)),
            run_ms=1,
        )
        self._scaler.on_report(
            LoadReported(
                worker=worker.name, number=0, every_ms=5000, pools=(load,), leaving=worker.leaving
            ),
            now_s,
        )
