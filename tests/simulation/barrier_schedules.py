"""`python -m tests.simulation.barrier_schedules [COUNT]`: several policies at a version barrier.

Each schedule runs the real `WholeCore`, and a `BatchAssembler` with its `Barrier` for each
policy, in virtual time. Episodes, trainers and the reading of each partition take random times.
Trainers stop for a minute, and jobs die and read the log again. Two rules are judged by a world
that knows all: no batch is made too far ahead of a policy that has work left, and in the end each
policy has decided every task and has published every batch.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeStarted,
    Event,
    GroupClosed,
    GroupSample,
    PolicyPublished,
    Ref,
    Sampling,
    TaskSubmitted,
    Use,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.verify.invariants.token_age import behind
from headrace.stream_jobs.barrier import Barrier
from headrace.stream_jobs.batches import BatchAssembler
from tests.whole_core import WholeCore

BEGAN_S = 1_000_000.0
LATEST_S = BEGAN_S + 100_000.0
"""A schedule that goes on for so long makes no progress."""
DEAD_S = 60.0
NAMES = ("a", "b", "c")


def violations_of(seed: int) -> list[str]:
    """Runs a schedule. Returns what broke a rule."""
    schedule = Schedule(seed)
    schedule.run()
    return schedule.violations


@dataclass(eq=False)
class _Learner:
    """One policy: its job, its trainer, and what the world knows of it."""

    name: str
    job: BatchAssembler
    barrier: Barrier
    keeps: float
    """The share of its groups that no filter drops."""
    trains_s: float
    queue: list[int] = field(default_factory=list)
    training: bool = False
    batches: list[BatchAssembled] = field(default_factory=list)
    published: int = -1
    decided: Frontier = field(default_factory=Frontier)
    kept: dict[int, int] = field(default_factory=dict)
    """Its closed groups that no filter dropped and no batch decided, to their oldest version."""
    skipped: set[int] = field(default_factory=set)
    read: dict[str, int] = field(default_factory=dict)
    """How much of each partition its job has read."""
    jobs: int = 0


class Schedule:
    """One schedule, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        draw = self._random
        names = NAMES[: draw.choice([2, 3])]
        self.ahead = draw.choice([1, 1, 2, 3])
        self._tasks = draw.randrange(8, 40)
        # By a chance of its own, so that the other schedules stay what they were.
        later = random.Random(f"hopeless {seed}")
        hopeless = later.random() < 0.3
        self._waiting = later.choice([1, 2, 4]) if hopeless else 64
        self.recipe = Recipe.model_validate(
            {
                "name": "schedules",
                "tasks": {"samples": 1, "roles": {name: name for name in names}},
                "scheduler": {
                    "live_episodes": draw.randrange(1, 12),
                    "require_reports": False,
                },
                "barrier": {"versions": self.ahead, "waiting_batches": self._waiting},
                "policies": {name: self._policy() for name in names},
            }
        )
        self._core = WholeCore(self.recipe)
        self._learners = {
            name: _Learner(
                name,
                *self._job(name),
                keeps=draw.choice([0.05, 0.2, 0.5, 1.0]),
                trains_s=draw.choice([0.1, 1.0, 10.0]),
            )
            for name in names
        }
        if hopeless:
            later.choice(list(self._learners.values())).keeps = 0.0
        self._log: dict[str, list[tuple[float, Event]]] = {}
        """Each partition's records, and when they were written."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = BEGAN_S
        self._ended: set[int] = set()
        self.apart = 0
        """The most versions that a policy was ahead of another one that had work."""
        self.violations: list[str] = []

    def _policy(self) -> dict[str, object]:
        draw = self._random
        batches = {
            "groups": draw.randrange(1, 5),
            "max_staleness": draw.choice([1, 4, 16]),
            "prefetch": draw.choice([0, 1, 2]),
            "batch_wait_s": 5.0,
        }
        return {"model": "tiny-llama", "batches": batches}

    def _job(self, name: str) -> tuple[BatchAssembler, Barrier]:
        barrier = Barrier(self.recipe, name)
        return BatchAssembler(self.recipe, name, barrier=barrier), barrier

    def run(self) -> None:
        """Runs until nothing happens any more."""
        for number in range(self._tasks):
            self._core.on_task(number, self._task(number))
        for learner in self._learners.values():
            self._publish(learner, 0, "initial")
        for _ in range(self._random.choice([0, 1, 3])):
            learner = self._random.choice(list(self._learners.values()))
            self._at(self._random.uniform(0.0, 100.0), partial(self._die, learner))
        while True:
            self._start()
            for learner in self._learners.values():
                self._assemble(learner)
            dues = [one.job.due_at(self._now) for one in self._learners.values()]
            due = min((one for one in dues if one is not None), default=None)
            if self._events and (due is None or self._events[0][0] <= due):
                self._now, _, happens = heapq.heappop(self._events)
                happens()
            elif due is not None:
                self._now = due
            else:
                break
            if self._now > LATEST_S:
                break
        self._judge_end()

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happens))

    def _task(self, number: int) -> TaskSubmitted:
        roles = {name: Use(policy=name, sampling=Sampling(max_tokens=1)) for name in self._learners}
        return TaskSubmitted(
            source="schedules", task_id=str(number), item_id=str(number), agent="default",
            roles=roles, max_turns=9, max_tokens=9, deadline_s=100,
        )  # fmt: skip

    def _start(self) -> None:
        while starts := self._core.next_start(self._now):
            if piled := self._piled_up():
                self.violations.append(
                    f"a task starts while {self._waiting} batches of {piled} wait"
                )
            for start in starts:
                self._core.on_started(start)
                self._write("episodes", start)
                seconds = self._random.choice([0.2, 1.0, 1.0, 20.0]) * self._random.random()
                self._at(seconds, partial(self._end, start))
        held, room = self._held(), self._core.room()
        free = all(room[name] > 0 for name in self._learners if name not in held)
        live_most = self.recipe.scheduler.live_episodes or 0
        may_start = held and free and self._core.live < live_most and not self._piled_up()
        if may_start and self._core.queued:
            self.violations.append(f"tasks wait for {sorted(held)}, which wait at the barrier")

    def _held(self) -> set[str]:
        """The policies whose next batch waits at the barrier; empty if all of them do."""
        held = {
            one.name
            for one in self._learners.values()
            for other in self._learners.values()
            if one is not other and len(one.batches) + 1 - other.published > self.ahead
        }
        return held if len(held) < len(self._learners) else set()

    def _piled_up(self) -> list[str]:
        """The policies at the barrier of which too many groups wait."""
        found = []
        for name in sorted(self._held()):
            learner, settings = self._learners[name], self.recipe.policies[name].batches
            fresh = [
                task
                for task, oldest in learner.kept.items()
                if behind(oldest, len(learner.batches), settings.prefetch, learner.skipped)
                <= settings.max_staleness
            ]
            if len(fresh) >= self._waiting * settings.groups:
                found.append(name)
        return found

    def _end(self, start: EpisodeStarted) -> None:
        self._core.on_outcome(start.task, start.sample)
        self._ended.add(start.task)
        for learner in self._learners.values():
            kept = self._random.random() < learner.keeps
            oldest = start.versions[learner.name]
            sample = GroupSample(
                sample=0, trajectory=Ref(topic="t", partition=0, offset=0, digest=bytes(16)),
                reward=1.0, advantages=pack_f32([1.0]), tokens=1, longest=1, oldest_version=oldest,
            )  # fmt: skip
            group = GroupClosed(
                task=start.task, policy=learner.name, item_id="i", mean=1.0,
                verdict="scored" if kept else "dropped", reason="" if kept else "zero_advantage",
                samples=(sample,) if kept else (), ended=int(self._now * 1000), seconds=1.0,
            )  # fmt: skip
            if kept:
                learner.kept[start.task] = oldest
            self._write(f"groups.{learner.name}", group)
            first = oldest if kept else None
            self._core.on_group(learner.name, start.task, oldest=first, tokens=1)

    def _write(self, partition: str, event: Event) -> None:
        """Appends a record, and lets each job read it after a while."""
        self._log.setdefault(partition, []).append((self._now, event))
        for learner in self._learners.values():
            delay_s = self._random.choice([0.0, 0.01, 0.5])
            self._at(delay_s, partial(self._read, learner, partition, learner.jobs))

    def _read(self, learner: _Learner, partition: str, job: int) -> None:
        """Passes the next record of a partition to a job, unless that one has died."""
        position = learner.read.get(partition, 0)
        if job != learner.jobs or position >= len(self._log[partition]):
            return
        learner.read[partition] = position + 1
        written_s, event = self._log[partition][position]
        if isinstance(event, GroupClosed):
            if event.policy == learner.name:
                learner.job.on_group(event, position)
            else:
                learner.barrier.on_group(event)
        elif isinstance(event, EpisodeStarted):
            learner.job.on_start(event, written_s)
            learner.barrier.on_start(event)
        elif isinstance(event, PolicyPublished):
            learner.job.on_policy(event)
            learner.barrier.on_policy(event)
        elif isinstance(event, BatchAssembled):
            learner.barrier.on_batch(event)

    def _die(self, learner: _Learner) -> None:
        """Replaces a job by one that knows only the log."""
        learner.jobs += 1
        learner.job, learner.barrier = self._job(learner.name)
        for batch in learner.batches[-learner.job.batches_needed :]:
            learner.job.on_batch(batch)
        last = learner.batches[-1] if learner.batches else None
        learner.read = {f"groups.{learner.name}": last.groups_read if last else 0}
        for other in learner.barrier.others:
            written = self._learners[other].batches
            learner.read[f"batches.{other}"] = max(0, len(written) - 1)
            learner.read[f"groups.{other}"] = written[-1].groups_read if written else 0
        for partition, records in self._log.items():
            for _ in range(learner.read.get(partition, 0), len(records)):
                self._read(learner, partition, learner.jobs)
        learner.job.on_caught_up(self._now)

    def _assemble(self, learner: _Learner) -> None:
        while (batch := learner.job.next_batch(self._now)) is not None:
            self._judge(learner, batch.version)
            learner.job.on_batch(batch)
            learner.batches.append(batch)
            learner.decided = batch.frontier()
            for task in [one for one in learner.kept if one in learner.decided]:
                del learner.kept[task]
            self._write(f"batches.{learner.name}", batch)
            self._core.on_batch(learner.name, batch.version, batch.frontier(), batch.samples)
            learner.queue.append(batch.version)
            self._train(learner)

    def _train(self, learner: _Learner) -> None:
        if not learner.queue or learner.training:
            return
        learner.training = True
        dead_s = DEAD_S if self._random.random() < 0.02 else 0.0
        version = learner.queue.pop(0)
        seconds = self._random.uniform(0.5, 1.5) * learner.trains_s + dead_s
        skipped = not learner.batches[version - 1].samples
        self._at(
            seconds, lambda: self._publish(learner, version, "skipped" if skipped else "trained")
        )

    def _publish(self, learner: _Learner, version: int, status: str) -> None:
        learner.published = version
        learner.training = False
        if status == "skipped":
            learner.skipped.add(version)
        event = PolicyPublished.model_validate(
            {"policy": learner.name, "version": version, "status": status,
             "digest": bytes(32), "full_version": version}
        )  # fmt: skip
        self._write("policies", event)
        self._core.on_policy(learner.name, version, skipped=status == "skipped")
        self._train(learner)

    def _judge(self, learner: _Learner, version: int) -> None:
        started = self._core.started_below
        for other in self._learners.values():
            if other is learner:
                continue
            ended = self._ended == set(range(started))
            idle = ended and all(task in other.decided for task in range(started))
            if idle and len(other.batches) == other.published:
                continue
            self.apart = max(self.apart, version - other.published)
            if version - other.published > self.ahead:
                self.violations.append(
                    f"batch {version} of {learner.name}: {other.name} is at {other.published}"
                )

    def _judge_end(self) -> None:
        if self._core.queued or len(self._ended) < self._tasks:
            self.violations.append(f"{self._core.queued} tasks wait, {len(self._ended)} ended")
        for learner in self._learners.values():
            decided = len(learner.decided)
            if decided < self._tasks or learner.published < len(learner.batches):
                self.violations.append(
                    f"{learner.name} has decided {decided} of {self._tasks} tasks, and published "
                    f"{learner.published} of {len(learner.batches)} batches"
                )


def main() -> None:
    """Runs schedules, and prints the seeds that break a rule."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.barrier_schedules", description=__doc__
    )
    parser.add_argument("count", nargs="?", type=int, default=10_000)
    options = parser.parse_args()
    failed = 0
    apart: dict[int, int] = {}
    for seed in range(options.count):
        schedule = Schedule(seed)
        schedule.run()
        apart[schedule.ahead] = max(apart.get(schedule.ahead, 0), schedule.apart)
        if schedule.violations:
            failed += 1
            print(f"seed {seed}: {schedule.violations[0]}", flush=True)
    most = ", ".join(f"{most} with versions = {ahead}" for ahead, most in sorted(apart.items()))
    print(f"{options.count} schedules, {failed} broke a rule; most versions apart: {most}")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
