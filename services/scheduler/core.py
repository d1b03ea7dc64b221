"""Decides which task may start now. Pure: it uses neither the log nor a clock.

The tasks of a tenant start in submission order (`lanes.py`). A task starts whole, with all its
samples. A task that can't be run starts at once as a single episode with a verdict, so that it ends
like any other.

Evaluation tasks have a queue and a limit of their own. Training and evaluation never wait for each
other; if both may start, they alternate. A role that names no version is pinned to the newest one.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from headrace.schemas.events import (
    BatchSample,
    EpisodeStarted,
    Failure,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.lanes import Lane, Tenants
from headrace.services.scheduler.policy_room import PolicyRoom, has_room
from headrace.services.scheduler.worker_pools import WorkerPools
from headrace.services.tasks.admission import refusal, refused
from headrace.services.tasks.cancellation import CancelledTasks, TaskId, id_of

MAX_NAME = 1_000
"""A task that is not run keeps at most so many characters of each name."""
RUN_ENDING = "the run is ending"
Purpose = Literal["train", "evaluate"]


@dataclass(slots=True)
class _Started:
    """A started task."""

    samples: int
    purpose: Purpose
    tenant: str
    trains: bool
    ended: set[int] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    """Policies that dropped its group."""


class SchedulerCore:
    """Admits tasks: events go in, starts come out.

    An event may come more than once, and before the task that it is about.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._limits = recipe.scheduler
        self._policies = {
            name: PolicyRoom(policy.batches, recipe.tasks.samples * recipe.tasks.max_tokens)
            for name, policy in recipe.policies.items()
            if policy.training is not None
        }
        self.tenants = Tenants(self._limits.tenants)
        self._lanes: dict[Purpose, Lane] = {
            "train": Lane(recipe.live_episodes, self.tenants),
            "evaluate": Lane(self._limits.evaluation_episodes, self.tenants),
        }
        self._evaluated_last = False
        """Whether the last started task was an evaluation: then a training task is next."""
        self._published: dict[str, int] = {}
        """Policy to its newest version."""
        self._queued: dict[TaskId, int] = {}
        """Waiting task to its number."""
        self._cancelled = CancelledTasks()
        self._verdicts: deque[tuple[int, TaskSubmitted, Failure]] = deque()
        self._started: dict[int, _Started] = {}
        self._seen: OrderedDict[int, int] = OrderedDict()
        """Digest of a task's id to the task's number, in ascending order of the numbers."""
        self.pools = WorkerPools(recipe)
        self._next_start_s = 0.0
        self._interval_s = 0.0
        """Seconds between the last start and the next one."""
        self._ending = False

    @property
    def queued(self) -> int:
        """How many tasks wait."""
        return sum(map(len, self._lanes.values()))

    @property
    def started_below(self) -> int:
        """One more than the highest number of a started task."""
        return max(self._started, default=-1) + 1

    @property
    def live(self) -> int:
        """How many episodes were started and have not ended."""
        return sum(lane.live for lane in self._lanes.values())

    def room(self) -> dict[str, int]:
        """Policy to how many groups may start now."""
        return {name: policy.room for name, policy in self._policies.items()}

    def remember(self, number: int, submitted: TaskSubmitted) -> bool:
        """Remembers a task's id. Returns False if a task with a lower number has the same id."""
        text = json.dumps([submitted.source, submitted.task_id])
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        first = self._seen.setdefault(digest, number)
        oldest = number - self._limits.duplicates_window
        while self._seen and next(iter(self._seen.values())) <= oldest:
            self._seen.popitem(last=False)
        return first >= number

    def on_task(self, number: int, submitted: TaskSubmitted) -> None:
        """Takes a submitted task. If it was started already, only its id is remembered."""
        duplicate = not self.remember(number, submitted)
        if number in self._started:
            return
        verdict = refusal(self._recipe, submitted)
        if verdict is None and duplicate:
            verdict = refused("duplicate", "a task of this source and id was submitted before")
        if verdict is None and (reason := self._cancelled.reason(submitted)) is not None:
            verdict = _cancelled(reason)
        if verdict is None and self._ending:
            verdict = _cancelled(RUN_ENDING)
        if verdict is not None:
            self._verdicts.append((number, submitted, verdict))
        else:
            self._lanes[submitted.purpose].add(number, submitted)
            self._queued[id_of(submitted)] = number

    def on_cancelled(self, event: TaskCancelled) -> None:
        """Takes a cancellation. The agent worker ends tasks that were started already."""
        if self._cancelled.add(event) and (number := self._queued.get(id_of(event))) is not None:
            self._verdicts.append((number, self._dequeue(number), _cancelled(event.reason)))

    def on_started(self, started: EpisodeStarted) -> None:
        """Takes a start from the log, written by this scheduler or an earlier one."""
        if started.task in self._started:
            return
        submitted = started.submitted
        trains = started.verdict is None and submitted.purpose == "train"
        purpose, tenant = submitted.purpose, submitted.tenant
        self._started[started.task] = _Started(submitted.samples, purpose, tenant, trains)
        self._lanes[purpose].count(tenant, submitted.samples)
        for policy in self._policies.values():
            if trains:
                policy.start(started.task)

    def on_outcome(self, number: int, sample: int) -> None:
        """Takes the end of an episode."""
        task = self._started.get(number)
        if task is not None and sample not in task.ended:
            task.ended.add(sample)
            self._lanes[task.purpose].count(task.tenant, -1)

    def on_group(self, policy: str, number: int, *, oldest: int | None, tokens: int = 0) -> None:
        """Takes a closed group: the version of its oldest token, and its number of tokens.

        `oldest` is -1 if a token is demonstrated, and None if the group is dropped. A dropped group
        frees its room, and so does a stale one.
        """
        known = self._policies.get(policy)
        if known is None:
            return
        if oldest is None:
            known.drop(number)
            if number in self._started:
                self._started[number].dropped.add(policy)
        else:
            known.close(number, oldest, tokens)

    def on_batch(
        self,
        policy: str,
        version: int,
        decided: Frontier,
        trained: Iterable[BatchSample] = (),
    ) -> None:
        """Takes a batch: its version, the tasks that are decided by then, and its samples."""
        if policy in self._policies:
            self._policies[policy].on_batch(version, decided, trained)

    def on_policy(self, policy: str, version: int, *, skipped: bool = False) -> None:
        """Takes a published version. `skipped`: it has the weights of the version before it."""
        self._published[policy] = max(version, self._published.get(policy, version))
        if policy in self._policies:
            self._policies[policy].published = self._published[policy]
            if skipped:
                self._policies[policy].skip(version)

    def end(self) -> None:
        """Ends the run: cancels the tasks that wait, and all that will come."""
        self._ending = True
        for lane in self._lanes.values():
            for number in list(lane):
                self._verdicts.append((number, self._dequeue(number), _cancelled(RUN_ENDING)))

    def next_start(self, now_s: float) -> list[EpisodeStarted]:
        """The starts of all samples of the next task, or an empty list if no task may start.

        The caller writes them and passes them to `on_started`. `now_s` is in seconds since the
        epoch; deadlines count from it.
        """
        if self._verdicts:
            number, submitted, verdict = self._verdicts.popleft()
            return [_start(number, 0, _without_bulk(submitted), now_s, verdict)]
        found = self._next(now_s) if self.wait_s(now_s) <= 0 else None
        if found is None:
            return []
        number, submitted = found
        self._dequeue(number)
        self._evaluated_last = submitted.purpose == "evaluate"
        policies = {use.policy for use in submitted.roles.values()}
        self.pools.on_started(policies, submitted.samples)
        if self._limits.starts_per_s is not None:
            self._interval_s = submitted.samples / self._limits.starts_per_s
            self._next_start_s = now_s + self._interval_s
        return [
            _start(number, sample, self._pinned(submitted), now_s, None, self._versions())
            for sample in range(submitted.samples)
        ]

    def _versions(self) -> dict[str, int]:
        """The newest version of each policy in training."""
        return {name: self._published[name] for name in self._policies if name in self._published}

    def wait_s(self, now_s: float) -> float:
        """Seconds until `starts_per_s` allows the next start."""
        left_s = self._next_start_s - now_s
        # A longer wait means that the clock was set back. Then there is no reason to wait.
        return left_s if self.queued and 0.0 < left_s <= self._interval_s else 0.0

    def finished(self, number: int) -> bool:
        """Whether nothing about a task can change any more. If so, it is forgotten."""
        task = self._started.get(number)
        if task is None or len(task.ended) < task.samples:
            return False
        for name, policy in self._policies.items():
            if task.trains and name not in task.dropped and number not in policy.decided:
                return False
        del self._started[number]
        return True

    def forget_below(self, number: int) -> None:
        """Forgets tasks below `number`: they were finished before this scheduler caught up."""
        for old in [task for task in self._started if task < number]:
            task = self._started.pop(old)
            self._lanes[task.purpose].count(task.tenant, len(task.ended) - task.samples)
            for policy in self._policies.values():
                policy.drop(old)

    def _dequeue(self, number: int) -> TaskSubmitted:
        lane = next(lane for lane in self._lanes.values() if number in lane)
        submitted = lane.remove(number)
        if self._queued.get(id_of(submitted)) == number:
            del self._queued[id_of(submitted)]
        return submitted

    def _next(self, now_s: float) -> tuple[int, TaskSubmitted] | None:
        """The task that may start now, or None."""
        purposes: tuple[Purpose, Purpose] = ("evaluate", "train")
        for purpose in reversed(purposes) if self._evaluated_last else purposes:
            found = self._lanes[purpose].next(lambda task: self._may_start(task, now_s))
            if found is not None:
                return found
        return None

    def _may_start(self, submitted: TaskSubmitted, now_s: float) -> bool:
        """Whether there is room for a training group, or a version of each policy to evaluate."""
        if not self.pools.take_more({use.policy for use in submitted.roles.values()}, now_s):
            return False
        if submitted.purpose == "train":
            return has_room(self._recipe, self._policies, self._published)
        return all(use.policy in self._published for use in submitted.roles.values())

    def _pinned(self, submitted: TaskSubmitted) -> TaskSubmitted:
        """An evaluation task with a version for every role; any other task as it is."""
        if submitted.purpose != "evaluate":
            return submitted
        roles = {
            role: use
            if use.version is not None
            else use.model_copy(update={"version": self._published[use.policy]})
            for role, use in submitted.roles.items()
        }
        return submitted.model_copy(update={"roles": roles})


def _without_bulk(submitted: TaskSubmitted) -> TaskSubmitted:
    """A task that is not run, reduced to one sample and its names."""
    names = ("source", "task_id", "tenant", "item_id", "agent")
    changes: dict[str, object] = {name: getattr(submitted, name)[:MAX_NAME] for name in names}
    changes |= {"samples": 1, "payload": "{}", "options": "{}", "environment": None}
    changes |= {"roles": {}, "artifacts": (), "labels": {}}
    return submitted.model_copy(update=changes)


def _cancelled(reason: str) -> Failure:
    return refused("cancelled", reason[:MAX_NAME])


def _start(
    number: int,
    sample: int,
    submitted: TaskSubmitted,
    now_s: float,
    verdict: Failure | None,
    versions: Mapping[str, int] = MappingProxyType({}),
) -> EpisodeStarted:
    return EpisodeStarted(
        task=number,
        sample=sample,
        submitted=submitted,
        seed=_seed(submitted.seed, number, sample),
        deadline=int(now_s * 1000) + max(1, submitted.deadline_s) * 1000,
        verdict=verdict,
        versions=dict(versions),
    )


def _seed(*parts: int) -> int:
    """A 63-bit seed that follows from its parts and differs for each sample."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
