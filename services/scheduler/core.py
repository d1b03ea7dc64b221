"""Decides which task may start now. Pure: it uses neither the log nor a clock.

The tasks of a tenant start in submission order, as far as their environments have room
(`lanes.py`). A task starts whole, with all its samples. A task that can't be run starts as a single
episode with a verdict, so that it ends like any other. It takes no room, and few of them are live
at a time (`refused_tasks.py`); they take turns with the tasks that may run.

Evaluation tasks have a queue and a limit of their own. Training and evaluation never wait for each
other; if both may start, they alternate. A role that names no version is pinned to the newest one.

A task that waits is remembered by its number, and by what decides when it starts (`WaitingTask`).
The caller has the whole task in the log, and passes it again when it starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain

from headrace.schemas.events import (
    BatchSample,
    EpisodeStarted,
    Failure,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.environment_room import EnvironmentRoom
from headrace.services.scheduler.lanes import Chance, Lane, Tenants
from headrace.services.scheduler.policy_room import PolicyRoom, has_room
from headrace.services.scheduler.refused_tasks import REFUSED_TASK, RefusedTasks, not_run
from headrace.services.scheduler.starts import (
    UNPROVED,
    ChosenTask,
    cancelled,
    lost,
    pinned,
    start,
    start_of_refused,
    unproved,
)
from headrace.services.scheduler.waiting_tasks import (
    AlikeTasks,
    KnownIds,
    Purpose,
    StartedTask,
    WaitingTask,
)
from headrace.services.scheduler.worker_pools import WorkerPools
from headrace.services.tasks.admission import refusal, refused
from headrace.services.tasks.cancellation import KEPT_BY_SCHEDULER, CancelledTasks

RUN_ENDING = "the run is ending"


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
        self.environments = EnvironmentRoom(recipe, self.tenants)
        most = recipe.live_episodes, self._limits.evaluation_episodes
        train, evaluate = (Lane(one, self.tenants, self.environments.limits) for one in most)
        self._lanes: dict[Purpose, Lane[WaitingTask]] = {"train": train, "evaluate": evaluate}
        self._evaluated_last = False
        """Whether the last started task was an evaluation: then a training task is next."""
        self._published: dict[str, int] = {}
        """Policy to its newest version."""
        self._alike = AlikeTasks()
        self._cancelled = CancelledTasks(recipe.scheduler.trusted, KEPT_BY_SCHEDULER)
        self.refused = RefusedTasks()
        self._refused_last = False
        """Whether the last started task was not run: then one that may run is next."""
        self._round_is_new = True
        self._started: dict[int, StartedTask] = {}
        self._ids = KnownIds(self._limits.duplicates_window, self.waits)
        self.pools = WorkerPools(recipe)
        self._next_start_s = 0.0
        self._interval_s = 0.0
        """Seconds between the last start and the next one."""
        self._ending = False

    @property
    def queued(self) -> int:
        """How many tasks wait to be run."""
        return sum(map(len, self._lanes.values()))

    @property
    def started_below(self) -> int:
        """One more than the highest number of a started task."""
        return max(self._started, default=-1) + 1

    @property
    def live(self) -> int:
        """How many episodes were started and have not ended, without those that are not run."""
        return sum(lane.live for lane in self._lanes.values())

    def room(self) -> dict[str, int]:
        """Policy to how many groups may start now."""
        return {name: policy.room for name, policy in self._policies.items()}

    def waits(self, number: int) -> bool:
        """Whether a task is known and has not been chosen to start."""
        return number in self.refused or any(number in lane for lane in self._lanes.values())

    def waiting(self, below: int) -> list[int]:
        """Returns the numbers of the tasks below a number that have not started, ascending."""
        return sorted(one for one in chain(*self._lanes.values(), self.refused) if one < below)

    def is_started(self, number: int) -> bool:
        """Whether a task was started and is not finished."""
        return number in self._started

    def samples(self, number: int) -> int:
        """How many episodes a started task has."""
        return self._started[number].samples

    def remember(self, number: int, submitted: TaskSubmitted) -> bool:
        """Remembers a task's id. Returns False if a task with a lower number has the same id."""
        return self._ids.add(number, self._cancelled.id_of(submitted))

    def on_unproved(self, number: int) -> None:
        """Takes a task that no key of its tenant has signed. Its id stays free."""
        if number not in self._started:
            self.refused.add_unproved(number)

    def on_task(self, number: int, submitted: TaskSubmitted, *, accepted: bool = False) -> None:
        """Takes a submitted task. If it was started already, only its id is remembered.

        `accepted`: an earlier scheduler has found that it may run.
        """
        duplicate = not self.remember(number, submitted)
        if number in self._started:
            return
        verdict = None if accepted else refusal(self._recipe, submitted)
        if verdict is None and duplicate and not accepted:
            verdict = refused("duplicate", "a task of this source and id was submitted before")
        when_read = verdict is not None
        if verdict is None and (reason := self._cancelled.reason(submitted)) is not None:
            verdict = cancelled(reason)
        if verdict is None and self._ending:
            verdict = cancelled(RUN_ENDING)
        if verdict is not None:
            self.refused.add(number, verdict, when_read=when_read)
        else:
            self._lanes[submitted.purpose].add(number, self._alike.of(submitted))

    def on_lost(self, number: int) -> None:
        """Takes a task that waits, although the log no longer holds it."""
        self.refused.add(number, lost())

    def on_cancelled(self, event: TaskCancelled, key: str = "") -> None:
        """Takes a cancellation, and the trusted key that has signed it, or an empty text.

        The agent worker ends tasks that were started already.
        """
        for task in self._cancelled.add(event, key):
            if (number := self._ids.number(task)) is not None:
                self._cancel(number, event.reason)

    def _cancel(self, number: int, reason: str) -> None:
        """Ends a task, if it waits."""
        for lane in self._lanes.values():
            if number in lane:
                self.environments.leave(lane.remove(number))
                self.refused.add(number, cancelled(reason))

    def on_started(self, started: EpisodeStarted) -> None:
        """Takes a start from the log, written by this scheduler or an earlier one."""
        if started.task not in self._started:
            verdict = started.verdict
            task = self._alike.of(started.submitted) if verdict is None else not_run(verdict)
            self._begin(started.task, task, verdict)

    def _begin(self, number: int, task: WaitingTask, verdict: Failure | None) -> None:
        trains = verdict is None and task.purpose == "train"
        self._started[number] = StartedTask(task, task.samples, trains)
        self._count(task, task.samples)
        for policy in self._policies.values() if trains else ():
            policy.start(number)

    def _count(self, task: WaitingTask, episodes: int) -> None:
        """Adds episodes to those that are live."""
        if not self.refused.count(task, episodes):
            self._lanes[task.purpose].count(task.tenant, episodes)
            self.environments.count(task, episodes)

    def on_outcome(self, number: int, sample: int) -> None:
        """Takes the end of an episode."""
        task = self._started.get(number)
        if task is not None and sample < task.samples and not task.ended >> sample & 1:
            task.ended |= 1 << sample
            self._count(task.task, -1)

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
                self._started[number].dropped |= {policy}
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
        """Ends the run: cancels the tasks that wait, and all that come."""
        self._ending = True
        for lane in self._lanes.values():
            for number in list(lane):
                self._cancel(number, RUN_ENDING)

    def choose(self, now_s: float, *, new_round: bool = True) -> ChosenTask | None:
        """Returns the task that starts now, or None if no task may start. It counts as started.

        `now_s` is in epoch seconds. The caller writes its `starts`. For rounds see `Lane.next`.
        """
        self._round_is_new = self._round_is_new or new_round
        refused, found = None if self._refused_last else self.refused.take(), None
        if refused is None and self.wait_s(now_s) <= 0:
            found = self._next(now_s)
        if found is None:
            refused = refused or self.refused.take() or self.refused.take_unproved()
            if refused is None:
                return None
            self._refused_last = True
            self._begin(refused.number, not_run(refused.verdict), refused.verdict)
            return ChosenTask(refused.number, refused.verdict)
        self._refused_last = False
        number, task = found
        self._lanes[task.purpose].remove(number)
        self._begin(number, task, None)
        self._evaluated_last = task.purpose == "evaluate"
        self.pools.on_started(task.policies, task.samples)
        if self._limits.starts_per_s is not None:
            self._interval_s = task.samples / self._limits.starts_per_s
            self._next_start_s = now_s + self._interval_s
        return ChosenTask(number, None)

    def starts(
        self, chosen: ChosenTask, submitted: TaskSubmitted | None, now_s: float
    ) -> list[EpisodeStarted]:
        """Returns the starts of all samples of a chosen task, from which its deadlines count.

        `submitted` is the task. If it is None, the log no longer holds it: it ends at once.
        """
        number, verdict = chosen.number, chosen.verdict
        if submitted is None and verdict is None:
            self._unbegin(number)
            verdict = lost()
        if submitted is None or verdict is not None:
            assert verdict is not None
            if submitted is not None and verdict.code == UNPROVED:
                verdict = unproved(self._limits.trusted.refusal(submitted.tenant, ""))
            return [start_of_refused(number, submitted, verdict, now_s)]
        task, versions = pinned(submitted, self._published), self._versions()
        return [
            start(number, sample, task, now_s, None, versions)
            for sample in range(submitted.samples)
        ]

    def _unbegin(self, number: int) -> None:
        """Counts a chosen task as one that is not run."""
        task = self._started[number]
        self._count(task.task, -task.samples)
        task.task, task.samples, task.trains = REFUSED_TASK, 1, False
        self._count(task.task, 1)
        for policy in self._policies.values():
            policy.drop(number)

    def _versions(self) -> dict[str, int]:
        return {name: self._published[name] for name in self._policies if name in self._published}

    def wait_s(self, now_s: float) -> float:
        """Seconds until `starts_per_s` allows the next start."""
        left_s = self._next_start_s - now_s
        # A longer wait means that the clock was set back. Then there is no reason to wait.
        return left_s if self.queued and 0.0 < left_s <= self._interval_s else 0.0

    def finished(self, number: int) -> bool:
        """Whether nothing about a task can change any more. If so, it is forgotten."""
        task = self._started.get(number)
        if task is None or task.ended.bit_count() < task.samples:
            return False
        for name, policy in self._policies.items():
            if task.trains and name not in task.dropped and number not in policy.decided:
                return False
        del self._started[number]
        return True

    def _next(self, now_s: float) -> tuple[int, WaitingTask] | None:
        new_round, self._round_is_new = self._round_is_new, False
        purposes: tuple[Purpose, Purpose] = ("evaluate", "train")
        for purpose in reversed(purposes) if self._evaluated_last else purposes:
            if found := self._lanes[purpose].next(
                partial(self._chance, now_s), new_round=new_round
            ):
                return found
        return None

    def _may(self, now_s: float, task: WaitingTask) -> bool:
        """Whether there is room for a training group, or a version of each policy to evaluate."""
        if task.purpose == "train":
            may = has_room(self._recipe, self._policies, self._published)
        else:
            may = self._published.keys() >= task.policies
        return may and self.pools.take_more(task.policies, task.environment, now_s)

    def _chance(self, now_s: float, task: WaitingTask, within_limit: bool) -> Chance:
        able = partial(self._may, now_s)
        if not able(task):
            return Chance.WAITS
        is_free = self.environments.has_room(task, waits=within_limit, able=able)
        return Chance.STARTS if is_free else Chance.FULL
