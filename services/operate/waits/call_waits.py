"""What a prompt or an action waits for: a worker, its slot, its engine, or a limit. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from headrace.schemas.events import EnvironmentLoad, PoolLoad
from headrace.services.kafka.broker import Partition
from headrace.services.operate.waits.found_wait import Wait
from headrace.services.operate.waits.run_facts import LiveEpisode, Request, RunFacts
from headrace.services.operate.waits.service_waits import ServiceWaits
from headrace.services.worker.worker_loads import KnownLoad

STUCK_S = 5.0
"""A call that takes longer than this and STUCK_TIMES its worker's mean is called slow or stuck."""
STUCK_TIMES = 10.0
UNKNOWN_S = 60.0
"""Before an engine has completed a generation, nothing is usual: it is a problem only after this
time. That it has answered nothing is said from STUCK_S on."""
BUSY_S, BUSY_TIMES = 600.0, 100.0
"""A call of a worker that answers others is busy for this long, or so many times its mean."""

L = TypeVar("L", PoolLoad, EnvironmentLoad)


class CallWaits:
    """Finds what calls wait for."""

    def __init__(self, facts: RunFacts, services: ServiceWaits, now: float) -> None:
        self._facts = facts
        self._services = services
        self._now = now
        self._workers: dict[str, Wait] = {}

    def workers(self) -> Iterator[Wait]:
        """Yields the workers that calls wait for."""
        yield from self._workers.values()

    def wait(self, request: Request, episode: LiveEpisode) -> Wait:
        """Returns the wait of a call, and notes the worker that it waits for."""
        assert episode.started is not None
        if request.kind == "prompt":
            on, cause = self._prompt(request)
            name = f"prompt {request.id}"
        else:
            environment = episode.started.submitted.environment
            use = "" if environment is None else environment.use
            on, cause = self._action(request, use)
            name = f"action {request.id}"
        task, sample, _ = request.id.split("/", 2)
        return Wait(
            f"{request.kind}/{request.id}", request.kind, name, request.at, on, cause,
            f"headrace show {task}/{sample}",
        )  # fmt: skip

    def _prompt(self, request: Request) -> tuple[tuple[str, ...], str]:
        policy = request.policy
        for limit in ("in_flight", "calls"):
            key = f"policies.{policy}.limits.{limit}"
            if self._facts.limits.get(key) == 0:
                on = self._limit(key, request.at)
                return (on,), "a limit of calls is 0"
        alive = self._facts.pools.alive(policy, self._now)
        owner = _owner(alive, request.position.partition.number)
        if not [one for one in alive if not one.is_suspected(self._now)]:
            absent = self._services.silent("inference", policy, request.at)
            return (absent,), "no inference worker reports"
        if owner is None:
            return (), "no inference worker has its partition yet; it gets an owner in some seconds"
        if owner.is_suspected(self._now):
            return (self._silent_worker(owner.worker, "inference"),), "its worker is silent"
        return self._at_engine(request, owner)

    def _at_engine(
        self, request: Request, owner: KnownLoad[PoolLoad]
    ) -> tuple[tuple[str, ...], str]:
        policy, load = request.policy, owner.load
        newest = self._facts.policies[policy].version if policy in self._facts.policies else -1
        missing = self._services.problems(policy, "weights", "blobs")
        if load.version < newest and missing:
            return missing, f"its worker serves version {load.version} and can't load {newest}"
        if load.version < 0:
            on = self._note(
                f"worker/{owner.worker}", owner.worker, request.at,
                "it has not loaded a version of the policy yet", "its log says what it loads",
            )  # fmt: skip
            return (on,), "its worker has no weights yet"
        if load.waiting and load.busy >= load.slots:
            cause = (
                f"all {load.slots:,} slots are in use and {load.waiting:,} prompts wait; a "
                f"generation takes {load.run_ms / 1000:.3g} s"
            )
        else:
            cause = f"its engine has {load.busy:,} prompts of {load.slots:,}"
        mean_s = load.run_ms / 1000
        bound_s = max(STUCK_S, STUCK_TIMES * mean_s) if load.run_ms else UNKNOWN_S
        topic = request.position.partition.topic
        answers = [
            self._facts.answered_in.get(Partition(topic, number), 0.0)
            for number in owner.partitions
        ]
        idle_s = self._now - max(self._began(request, owner.worker), *answers, 0.0)
        if idle_s > max(STUCK_S, mean_s):
            mean = f"mean of a generation {mean_s:.3g} s" if load.run_ms else "no generation yet"
            cause += f". It has answered nothing for {idle_s:.0f} s ({mean})"
            cause += ": the engine may be stuck" if idle_s > bound_s else ": it is slow or stuck"
        long = self._now - request.at > max(BUSY_S, BUSY_TIMES * mean_s)
        on = self._note(
            f"worker/{owner.worker}", owner.worker, request.at, cause,
            "if it is stuck, kill this worker: another one answers its prompts. If it is only "
            "slow, start more: `headrace serve inference RECIPE`",
            busy=not long and idle_s <= bound_s,
        )  # fmt: skip
        return (on,), "its worker has not answered it"

    def _action(self, request: Request, use: str) -> tuple[tuple[str, ...], str]:
        detail = self._facts.details.get(request.id)
        scoring = detail is not None and detail.scores
        use = use if detail is None else detail.environment
        known = self._facts.recipe.environments.get(use)
        if known is not None and known.external:
            return (), f"another team's worker answers the environment {use}, and has not"
        alive = self._facts.environments.alive(use, self._now)
        if not [one for one in alive if not one.is_suspected(self._now)]:
            return (self._services.silent("env", "", request.at),), "no env worker reports"
        owner = _owner(alive, request.position.partition.number)
        if owner is None:
            return (), "no env worker has its partition yet; it gets an owner in some seconds"
        if owner.is_suspected(self._now):
            return (self._silent_worker(owner.worker, "env"),), "its worker is silent"
        return self._at_environment(request, use, owner, scoring)

    def _at_environment(
        self, request: Request, use: str, owner: KnownLoad[EnvironmentLoad], scoring: bool
    ) -> tuple[tuple[str, ...], str]:
        load, what = owner.load, f"the judge {use}" if scoring else f"the environment {use}"
        if load.waiting and load.busy >= load.slots:
            cause = f"all {load.slots:,} slots of {what} are in use and {load.waiting:,} wait"
        elif scoring:
            cause = f"{what} has not scored for {self._now - request.at:.0f} s"
        else:
            cause = f"{what} has not answered for {self._now - request.at:.0f} s"
        waited_s = self._now - self._began(request, owner.worker)
        slow = waited_s > max(STUCK_S, STUCK_TIMES * load.run_ms / 1000)
        if slow:
            cause += f": it is slow or stuck (mean of an action {load.run_ms / 1000:.3g} s)"
        limit = "score_s" if scoring else "step_s"
        on = self._note(
            f"worker/{owner.worker}/{use}", f"{owner.worker}, {what}", request.at, cause,
            f"start more workers: `headrace serve env RECIPE`. environments.{use}.{limit} in the "
            "recipe of a new run bounds it",
            busy=not slow,
        )  # fmt: skip
        return (on,), "its worker has not answered it"

    def _began(self, request: Request, worker: str) -> float:
        """Returns when a worker can have begun with a call: it may have started after it."""
        return max(request.at, self._facts.workers.first.get(worker, 0.0))

    def _silent_worker(self, worker: str, service: str) -> str:
        at = self._facts.workers.newest.get(worker, (self._now, False))[0]
        return self._note(
            f"worker/{worker}", worker, at,
            f"it has not reported for {self._now - at:.0f} s: it is stopped, stuck or dead",
            f"see whether it runs. If it is stuck, kill it; another one takes its work: `headrace "
            f"serve {service} RECIPE`",
        )  # fmt: skip

    def _limit(self, key: str, since: float) -> str:
        return self._note(
            f"service/{key}", key, since, "this limit is 0, so nothing new begins",
            f"headrace quota {key} --units NUMBER", kind="service",
        )  # fmt: skip

    def _note(
        self,
        name: str,
        label: str,
        since: float,
        cause: str,
        remedy: str,
        kind: str = "worker",
        *,
        busy: bool = False,
    ) -> str:
        """Notes a wait, or an older one of the same name. Returns its id."""
        known = self._workers.get(name)
        if known is None or since < known.since:
            self._workers[name] = Wait(name, kind, label, since, (), cause, remedy, busy)
        return name


def _owner(loads: Sequence[KnownLoad[L]], partition: int) -> KnownLoad[L] | None:
    """Returns the worker that says that it has a partition, one that is not suspected if it can."""
    owners = [one for one in loads if partition in one.partitions]
    return max(owners, key=lambda one: one.suspect_at, default=None)
