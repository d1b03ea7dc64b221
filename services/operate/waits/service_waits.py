"""Which service, worker or store stops a run. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.services.operate.waits.found_wait import Wait
from headrace.services.operate.waits.heard_workers import LifeRecord
from headrace.services.operate.waits.run_facts import LiveEpisode, RunFacts

ASKED = "the agent's own code runs, or its next request is on its way"


class ServiceWaits:
    """Finds services that don't run, and problems beside the log. Each is found once."""

    def __init__(self, facts: RunFacts, now: float) -> None:
        self._facts = facts
        self._now = now
        self._found: dict[str, Wait] = {}
        for problem in facts.problems:
            name = f"service/{problem.kind}/{problem.name}"
            kind = "broker" if problem.kind == "broker" else "service"
            self._found[name] = Wait(
                name, kind, problem.name, problem.since, (), problem.cause, problem.help
            )

    def found(self) -> Iterator[Wait]:
        """Yields the waits that were found."""
        yield from self._found.values()

    def problems(self, policy: str, *kinds: str) -> tuple[str, ...]:
        """Returns the ids of the problems of these kinds that stop a policy, or everything."""
        return tuple(
            f"service/{one.kind}/{one.name}"
            for one in self._facts.problems
            if one.kind in kinds and one.policy in ("", policy)
        )

    def absent(self, service: str, policy: str, since: float, what: str) -> str:
        """Notes that a service does not run. Returns the wait's id.

        `since` is when it was needed, `what` says how that shows.
        """
        name = f"service/{service}" + (f"/{policy}" if policy else "")
        life = self.last_life(service, policy)
        command = f"headrace serve {service} RECIPE" + (f" --policy {policy}" if policy else "")
        cause = what
        if life is not None and life.has_ended:
            since = max(since, life.at)
            cause += f"; the last one ended{f': {life.reason}' if life.reason else ''}"
        if error := self._facts.errors.get(service):
            cause += f"; its log on this machine ends with: {error}"
        label = f"{service} of {policy}" if policy else service
        known = self._found.get(name)
        since = since if known is None else min(since, known.since)
        self._found[name] = Wait(
            name, "service", label, since, (), cause,
            f"start one: `{command}`. If it starts and ends again, its log says why",
        )  # fmt: skip
        return name

    def silent(self, service: str, policy: str, since: float) -> str:
        """Notes that no worker of a service that should report does. Returns the wait's id."""
        heard = [
            (at, worker, left)
            for (name, worker), (at, left) in self._facts.workers.newest_of.items()
            if policy == name
        ] or [
            (at, worker, left)
            for worker, (at, left) in self._facts.workers.newest.items()
            if not policy and worker.startswith(f"{service}-")
        ]
        of = f" of {policy}" if policy and len(self._facts.policies) > 1 else ""
        what = f"no {service} worker{of} runs"
        if heard:
            at, worker, leaving = max(heard)
            left = " and left" if leaving else ""
            what += f": the last one, {worker}, reported{left} {self._now - at:.0f} s ago"
            since = min(max(since, at), self._now)
        return self.absent(service, policy, since, what)

    def last_life(self, service: str, policy: str = "") -> LifeRecord | None:
        """Returns the newest record of a service's worker that says that it lives, or else the
        newest one. A worker that names no policy works for all."""
        lives = [
            one
            for one in self._facts.workers.lives.values()
            if one.service == service and (policy == one.policy or "" in (policy, one.policy))
        ]
        alive = [one for one in lives if self.lives(one)]
        return max(alive or lives, key=lambda one: one.at, default=None)

    def lives(self, life: LifeRecord) -> bool:
        """Whether a worker lives, as far as is known."""
        return life.lives(self._now) and life.worker not in self._facts.ended_here

    def sole(self, service: str, policy: str, since: float) -> str | None:
        """Notes that a service without a consumer group does not run, as its lives say.

        None: one runs, or none of its records was read.
        """
        life = self.last_life(service, policy)
        if life is None or self.lives(life):
            return None
        gone_at = self._facts.ended_here.get(life.worker)
        what = f"no {service} runs"
        if gone_at is not None:
            what += f": the process of the last one, {life.worker}, has gone from this machine"
        elif not life.has_ended:
            what += f": the last one was heard of {int(self._now - life.at)} s ago"
        since = max(since, life.at if gone_at is None else gone_at)
        return self.absent(service, policy, since, what)

    def group(self, service: str, since: float) -> str | None:
        """Notes that a service has no member in its consumer group. None: it has one, or is not
        watched yet."""
        members = self._facts.members.get(service)
        if members is None or members.members:
            return None
        what = f"no {service} worker runs: its consumer group has no member"
        return self.absent(service, "", max(since, members.since), what)

    def agent(self, episode: LiveEpisode, now: float) -> tuple[list[str], str]:
        """Returns what an episode without an open request waits for, and the cause."""
        assert episode.started is not None
        name = episode.started.submitted.agent
        known = self._facts.recipe.agents.get(name)
        client = known is not None and known.use == "client"
        service = "gateway" if client else "agent"
        absent = self.group("agent", episode.at)
        if absent is not None:
            return [absent], "no agent worker plays it"
        if episode.newest > episode.at:
            return [], ASKED
        if client:
            return [], "it waits for a client of the gateway, or for the client's first call"
        return [], f"the {service} worker has not asked for anything yet"
