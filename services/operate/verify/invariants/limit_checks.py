"""What the order between topics shows, where one clock dates all records: limits were kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    LoadReported,
    PolicyPublished,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.operate.verify.invariants.token_age import behind

READ_S = 2.0
"""How long a job may take to read a start."""
LAG_S = 15.0
"""How far behind the log a scheduler that is not cut off yet may be in what it knows."""


def check(facts: Facts, recipe: Recipe) -> Violations:
    """Judges every start and every batch by what was in the log before it."""
    yield from _served(facts, recipe)
    world = _World(recipe)
    kinds = (EpisodeStarted, EpisodeEnded, GroupClosed, BatchAssembled, PolicyPublished)
    records: Iterable[Delivery[Event]] = [one for kind in kinds for one in facts.all(kind)]
    # Of what is recorded at the same moment, a start may know all the rest.
    for one in sorted(records, key=lambda o: (o.recorded_at, isinstance(o.event, EpisodeStarted))):
        event = one.event
        if isinstance(event, EpisodeStarted):
            yield from world.on_start(event, one.recorded_at)
        elif isinstance(event, EpisodeEnded):
            world.live[event.purpose].discard((event.task, event.sample))
            world.on_end(event)
        elif isinstance(event, GroupClosed):
            if event.policy in world.policies:
                world.policies[event.policy].on_group(event)
        elif isinstance(event, BatchAssembled):
            yield from world.at_barrier(event, one.recorded_at)
            yield from world.policies[event.policy].on_batch(event, one.recorded_at)
        elif isinstance(event, PolicyPublished) and event.policy in world.policies:
            policy = world.policies[event.policy]
            policy.published = max(policy.published, event.version)
            if event.status == "skipped":
                policy.skipped.add(event.version)


class _World:
    """What is live, and what is known of each policy that trains."""

    def __init__(self, recipe: Recipe) -> None:
        self.limits = {
            "train": recipe.live_episodes,
            "evaluate": recipe.scheduler.evaluation_episodes,
        }
        self.live: dict[str, set[tuple[int, int]]] = {purpose: set() for purpose in self.limits}
        self._tenants = recipe.scheduler.tenants
        self._environments = recipe.scheduler.environments
        self._live_in: dict[str, set[tuple[int, int]]] = {}
        """Live episodes by environment."""
        self._live_of: dict[tuple[str, str], set[tuple[int, int]]] = {}
        """Live episodes by tenant and purpose."""
        self.policies = {
            name: _LimitedPolicy(
                name,
                policy.batches.groups,
                policy.batches.max_staleness,
                policy.batches.prefetch,
            )
            for name, policy in recipe.policies.items()
            if policy.training is not None
        }
        self._tasks: set[int] = set()
        self._barrier = recipe.barrier
        self._ahead = recipe.barrier.versions if recipe.barrier else 0

    def on_start(self, event: EpisodeStarted, at_s: float) -> Violations:
        """A start keeps the limit of live episodes, and its task the room of every policy."""
        name = f"task {event.task}"
        purpose = event.submitted.purpose
        live, limit = self.live[purpose], self.limits[purpose]
        if event.verdict is not None:
            return  # It takes no room.
        live.add((event.task, event.sample))
        if len(live) > limit:
            alone = all(task == event.task for task, _ in live)
            if not alone:
                yield f"I8: {name} was started as live episode {len(live)} of {limit}"
        yield from self._of_tenant(event)
        yield from self._in_environment(event)
        if event.task in self._tasks:
            return
        self._tasks.add(event.task)
        if purpose == "train":
            for policy in self.policies.values():
                # Its scheduler may not know the newest version of the others yet.
                held = any(
                    policy.batch + 1 - (other.published - 1) > self._ahead
                    for other in self._set_of(policy.name)
                )
                yield from policy.on_task(event.task, at_s, event.deadline / 1000, held)

    def on_end(self, event: EpisodeEnded) -> None:
        """An episode of a tenant has ended."""
        self._live_of.get((event.tenant, event.purpose), set()).discard((event.task, event.sample))
        for live in self._live_in.values():
            live.discard((event.task, event.sample))

    def _of_tenant(self, event: EpisodeStarted) -> Violations:
        """A start keeps its tenant's limit, if the recipe has one and nobody has changed it."""
        tenant = event.submitted.tenant
        live = self._live_of.setdefault((tenant, event.submitted.purpose), set())
        live.add((event.task, event.sample))
        limit = self._tenants[tenant].live_episodes if tenant in self._tenants else None
        over = limit is not None and len(live) > limit
        if over and any(task != event.task for task, _ in live):
            yield f"I8: task {event.task} is live episode {len(live)} of {limit} of {tenant}"

    def _in_environment(self, event: EpisodeStarted) -> Violations:
        """A start keeps the limit of its environment, if nobody has changed it."""
        use = event.submitted.environment
        if use is None:
            return
        live = self._live_in.setdefault(use.use, set())
        live.add((event.task, event.sample))
        limit = self._environments.get(use.use)
        if limit is not None and len(live) > limit and any(task != event.task for task, _ in live):
            yield f"I8: task {event.task} is live episode {len(live)} of {limit} in {use.use}"

    def at_barrier(self, batch: BatchAssembled, at_s: float) -> Violations:
        """No batch is too far ahead of a policy of its set that has tasks left."""
        for other in self._set_of(batch.policy):
            known = [task for task, (began_s, _) in other.live.items() if began_s < at_s - READ_S]
            left = known or other.undecided & other.closed.keys() or other.batch > other.published
            if batch.version - other.published > self._ahead and left:
                name = f"batch {batch.policy}/{batch.version}"
                yield f"I5: {name} is ahead of {other.name}, which is at {other.published}"

    def _set_of(self, name: str) -> list[_LimitedPolicy]:
        """The other policies of a policy's set."""
        named = self._barrier.policies or tuple(self.policies) if self._barrier else ()
        return [self.policies[one] for one in named if one != name and name in named]


@dataclass
class _LimitedPolicy:
    """A policy that trains, as the log shows it at a moment."""

    name: str
    groups: int
    max_staleness: int
    prefetch: int
    skipped: set[int] = field(default_factory=set)
    published: int = -1
    undecided: set[int] = field(default_factory=set)
    """Tasks started and not decided."""
    before: list[tuple[float, int, set[int]]] = field(default_factory=list)
    """Until when, which batch was the newest, and what it decided when it came."""
    batch: int = 0
    live: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Tasks without a closed group, to when they were started and their deadline."""
    closed: dict[int, int] = field(default_factory=dict)
    """Scored groups to the version of their oldest token."""

    def on_task(self, task: int, at_s: float, deadline_s: float, held: bool) -> Violations:
        """A task that trains is started: there must be room, by what its scheduler may know, unless
        the policy is `held` at a barrier."""
        if self.published < 0:
            yield f"I5: task {task} was started before {self.name} had a version"
        hidden: set[int] = set()
        rooms = [self._room(self.batch, hidden)]
        for until_s, batch, decided in reversed(self.before):
            if until_s < at_s - LAG_S:
                break
            hidden = hidden | decided
            rooms.append(self._room(batch, hidden))
        if max(rooms) <= 0 and not held:
            yield f"I5: task {task} was started without room for {self.name}: {rooms[0]}"
        self.undecided.add(task)
        self.live[task] = (at_s, deadline_s)

    def on_group(self, event: GroupClosed) -> None:
        """A dropped group gives its room back, and a scored one as soon as it is stale."""
        self.live.pop(event.task, None)
        if event.verdict == "dropped":
            self.undecided.discard(event.task)
        else:
            oldest = min((one.oldest_version for one in event.samples), default=-1)
            self.closed.setdefault(event.task, oldest)
            self._free_stale()

    def _free_stale(self) -> None:
        for task in list(self.undecided & self.closed.keys()):
            oldest = self.closed[task]
            if behind(oldest, self.batch, self.prefetch, self.skipped) > self.max_staleness:
                self.undecided.discard(task)

    def on_batch(self, event: BatchAssembled, at_s: float) -> Violations:
        """A batch is at most `prefetch` ahead of what is published, and not empty too soon."""
        for task, (started_s, deadline_s) in self.live.items():
            if not event.samples and started_s < at_s - LAG_S and at_s < deadline_s:
                yield f"I5: batch {self.name}/{event.version} is empty, and task {task} is live"
        if event.version - 1 - self.published > self.prefetch:
            name = f"batch {self.name}/{event.version}"
            yield f"I5: {name} was assembled when version {self.published} was the newest"
        frontier = event.frontier()
        decided = {task for task in self.undecided if task in frontier}
        self.before.append((at_s, self.batch, decided))
        self.undecided -= decided
        self.batch = event.version
        self._free_stale()

    def _room(self, batch: int, hidden: set[int]) -> int:
        ahead = self.published - batch + self.max_staleness + 1
        return ahead * self.groups - len(self.undecided) - len(hidden)


def _served(facts: Facts, recipe: Recipe) -> Violations:
    """Nothing starts for a policy or an environment that no worker has reported to serve.

    How old the newest report may be is left to unit tests: a process that was stopped may write a
    start that it decided long before.
    """
    if not recipe.scheduler.require_reports:
        return
    first: dict[str, float] = {}
    for report in facts.in_order(LoadReported):
        for load in report.event.pools:
            if load.partitions:
                first.setdefault(load.policy, report.recorded_at)
        for run in report.event.environments:
            if run.partitions:
                first.setdefault(f"environments.{run.environment}", report.recorded_at)
    own = {key for key, one in recipe.environments.items() if not one.external}
    for start in facts.all(EpisodeStarted):
        if start.event.verdict is not None:
            continue
        submitted = start.event.submitted
        needed = sorted({use.policy for use in submitted.roles.values()})
        if submitted.environment is not None and submitted.environment.use in own:
            needed.append(f"environments.{submitted.environment.use}")
        for name in needed:
            if start.recorded_at < first.get(name, inf):
                task = start.event.task
                yield f"I8: task {task} started before a worker of {name} had reported"
