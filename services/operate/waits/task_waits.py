"""Why tasks have not started, by reason. Pure.

The scheduler has the rules: `services/scheduler/core.py`. This names the reason that a task would
find first, as far as the log shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headrace.schemas.version_barrier import held_at_barrier, others_of
from headrace.services.operate.waits.found_wait import Wait
from headrace.services.operate.waits.run_facts import RunFacts, WaitingFact
from headrace.services.operate.waits.service_waits import ServiceWaits
from headrace.services.scheduler.policy_room import PolicyRoom
from headrace.services.worker.limits.limits_of import limits_of_use

JUDGED = 1_000
"""The oldest tasks of which it is judged why they wait. The others wait behind them."""


class _Reason(NamedTuple):
    """Why a task waits."""

    cause: str
    help: str
    on: tuple[str, ...] = ()


def task_waits(
    facts: RunFacts, services: ServiceWaits, groups: tuple[str, ...], now: float
) -> Iterator[Wait]:
    """Yields a wait for each reason, named after the oldest task that has it."""
    judge = _Judge(facts, services, groups, now)
    found: dict[_Reason, list[int]] = {}
    for number in sorted(facts.tasks)[:JUDGED]:
        found.setdefault(judge.reason(facts.tasks[number]), []).append(number)
    unjudged = max(0, len(facts.tasks) - JUDGED) + facts.more_tasks
    for position, (reason, numbers) in enumerate(found.items()):
        others = len(numbers) - 1 + (unjudged if position == 0 else 0)
        name = f"task {numbers[0]}" + (f" and {others:,} more" if others else "")
        since = min(facts.tasks[number].at for number in numbers)
        yield Wait(f"task/{numbers[0]}", "task", name, since, reason.on, reason.cause, reason.help)


class _Judge:
    """What is live now."""

    def __init__(
        self,
        facts: RunFacts,
        services: ServiceWaits,
        groups: tuple[str, ...],
        now: float,
    ) -> None:
        self._facts, self._services, self._groups, self._now = facts, services, groups, now
        self._tenants, self._by_limit = facts.live_by()
        self._live = {purpose: facts.live_of(purpose) for purpose in ("train", "evaluate")}
        trained = {name: one for name, one in facts.policies.items() if one.trained}
        self._held = held_at_barrier(
            facts.recipe,
            {name: one.batch for name, one in trained.items()},
            {name: one.version for name, one in trained.items() if one.version >= 0},
        )

    def reason(self, task: WaitingFact) -> _Reason:
        """Returns why a task waits."""
        scheduler = self._services.group("scheduler", task.at)
        if scheduler is not None:
            return _Reason("no scheduler runs, which starts tasks", "headrace status", (scheduler,))
        if self._facts.state == "ending":
            return _Reason("the run is ending: it will be cancelled", "headrace status")
        return (
            self._tenant(task)
            or self._workers(task)
            or self._env_workers(task)
            or self._room(task)
            or self._environment(task)
            or self._limit(task)
            or _Reason(
                "nothing that the log shows holds it: the scheduler starts it soon, or is stuck",
                "the scheduler's log says what it does",
            )
        )

    def _tenant(self, task: WaitingFact) -> _Reason | None:
        limits = self._facts.tenants.get(task.tenant)
        live = self._tenants.get((task.tenant, task.purpose), 0)
        most = None if limits is None else limits.live_episodes
        if most is None or (most and live + task.samples <= most) or (most and not live):
            return None
        return _Reason(
            f"the quota of tenant {task.tenant!r} is {most:,} live episodes, and {live:,} are live",
            f"`headrace quota {task.tenant} --live-episodes NUMBER`, or `--unlimited`",
            self._groups if live else (),
        )

    def _limit(self, task: WaitingFact) -> _Reason | None:
        scheduler = self._facts.recipe.scheduler
        train = task.purpose == "train"
        most = self._facts.recipe.live_episodes if train else scheduler.evaluation_episodes
        live = self._live[task.purpose]
        if not live or live + task.samples <= most:
            return None
        key = "live_episodes" if train else "evaluation_episodes"
        return _Reason(
            f"{live:,} episodes are live, and scheduler.{key} allows {most:,}",
            "it starts when others end",
            self._groups,
        )

    def _environment(self, task: WaitingFact) -> _Reason | None:
        if not task.environment:
            return None
        for key in limits_of_use(self._facts.recipe, task.environment, task.image):
            most, live = self._facts.limits.get(key), self._by_limit.get(key, 0)
            if most is not None and (not most or (live and live + task.samples > most)):
                return _Reason(
                    f"{key} allows {most:,} live episodes, and {live:,} are live",
                    f"headrace quota {key} --units NUMBER",
                    self._groups if live else (),
                )
        return None

    def _workers(self, task: WaitingFact) -> _Reason | None:
        scheduler = self._facts.recipe.scheduler
        for policy in sorted(task.policies & self._facts.policies.keys()):
            if not self._facts.pools.is_served(policy, self._now):
                if not scheduler.require_reports:
                    continue
                on = self._services.silent("inference", policy, task.at)
                return _Reason(
                    f"no inference worker of {policy} reports, so nothing starts",
                    "headrace status",
                    (on,),
                )
            waiting = self._facts.pools.waiting_per_slot(policy, self._now)
            if waiting > scheduler.waiting_per_slot:
                return _Reason(
                    f"{waiting:.1f} prompts of {policy} wait for each slot, more than "
                    f"scheduler.waiting_per_slot = {scheduler.waiting_per_slot:g}",
                    "start more workers: `headrace serve inference RECIPE`",
                    self._groups,
                )
        return None

    def _env_workers(self, task: WaitingFact) -> _Reason | None:
        recipe = self._facts.recipe
        settings = recipe.environments.get(task.environment or "")
        if settings is None or settings.external or not recipe.scheduler.require_reports:
            return None
        if self._facts.environments.is_served(task.environment or "", self._now):
            return None
        return _Reason(
            f"no env worker with the environment {task.environment!r} reports, so nothing starts",
            "headrace status",
            (self._services.silent("env", "", task.at),),
        )

    def _room(self, task: WaitingFact) -> _Reason | None:
        train = task.purpose == "train"
        for name, policy in self._facts.policies.items():
            if not train and name not in task.policies:
                continue
            if policy.version < 0:
                return _Reason(
                    f"{name} has no version 0 yet", "headrace tail policies", (f"trainer/{name}",)
                )
            if not train or policy.room is None:
                continue
            if name in self._held:
                if (full := self._full_at_barrier(name, policy.room)) is not None:
                    return full
            elif policy.room.room <= 0:
                behind = policy.batch - policy.version
                on = (f"trainer/{name}",) if behind > 0 else self._groups
                return _Reason(
                    f"{name} has no room: {len(policy.room.open):,} groups are open, and with "
                    f"version {policy.version} and batch {policy.batch} more would get too stale",
                    f"it starts when {name} has a batch or a version more; see "
                    f"policies.{name}.batches.max_staleness",
                    on,
                )
        return None

    def _full_at_barrier(self, name: str, room: PolicyRoom) -> _Reason | None:
        """A policy that the barrier holds needs no room, until so many of its batches wait."""
        barrier = self._facts.recipe.barrier
        if barrier is None or not room.has_closed(barrier.waiting_batches):
            return None
        others = tuple(f"trainer/{one}" for one in others_of(self._facts.recipe, name))
        return _Reason(
            f"{name} waits at the version barrier with {barrier.waiting_batches} full batches",
            "it starts when the policies behind it have published; see barrier.waiting_batches",
            others,
        )
