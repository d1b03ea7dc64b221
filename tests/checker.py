"""Reads the whole log of a namespace and says where it breaks an invariant.

`check_namespace` reads it from a broker, `examine` judges deliveries from anywhere, without I/O.
Of two records with one id the first counts; a duplicate is counted, and is no violation unless
its writer is fenced. What this can't see: the weights behind a digest, and processes left over.

I1 each task and each episode has exactly one terminal record that counts. I2 a trajectory's turns
are those that were generated, none lost, doubled or of another attempt. I3 each sample is trained
once as fresh, or dropped with a reason; each task is decided by one batch. I5 versions are
contiguous, batch n trains version n, staleness is within its bound. I6 no reward comes from an
infrastructure failure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from schemas.events import (
    ActionRequested,
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GroupClosed,
    PolicyPublished,
    Ref,
    RunStateEntered,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
)
from schemas.frontier import Frontier
from schemas.packed import count, unpack_spans
from schemas.recipe import Recipe
from schemas.topics import DEAD_LETTERS
from services.errors import DecodeError
from services.kafka.broker import Partition, Record
from services.log import Delivery, EventLog, Start, reached, resolve_starts
from services.namespaces import open_namespace
from services.settings import Where

SHOWN = 40
"""Violations that a report shows; the rest is counted."""
NO_REWARD = ("failed", "deadline", "cancelled")
"""Endings from which nothing may be learned."""

E = TypeVar("E", bound=Event)
Episode = tuple[int, int]
"""Task and sample."""
Violations = Iterator[str]


@dataclass(frozen=True)
class Report:
    """What a log holds, and what is wrong with it."""

    violations: list[str]
    tasks: int
    tasks_ended: int
    episodes: int
    """Started."""
    episodes_ended: int
    batches: dict[str, int]
    """By policy."""
    versions: dict[str, int]
    """Newest published, by policy."""
    trained: int
    """Samples in batches, as fresh."""
    dropped: Counter[str]
    """Samples and whole groups that batches decided without training on them, by reason."""
    duplicates: dict[str, int]
    """Records whose id was in their topic before, by event; those without are left out."""
    undecodable: int

    def __str__(self) -> str:
        lines = [
            f"tasks {self.tasks}, ended {self.tasks_ended}; episodes {self.episodes}, ended "
            f"{self.episodes_ended}; batches {self.batches}, versions {self.versions}; samples "
            f"trained {self.trained}, dropped {dict(self.dropped)}; duplicates "
            f"{self.duplicates}; undecodable {self.undecodable}",
            f"{len(self.violations)} violations",
            *self.violations[:SHOWN],
        ]
        if len(self.violations) > SHOWN:
            lines.append(f"… and {len(self.violations) - SHOWN} more")
        return "\n".join(lines)


async def check_namespace(where: Where, *, drained: bool = True) -> Report:
    """Checks a namespace as it stands on a broker. `drained`: every task must have ended."""
    async with open_namespace(where, "checker") as (log, life):
        deliveries, undecodable = await read_all(log)
        return examine(life.recipe(), deliveries, drained=drained, undecodable=undecodable)


async def read_all(log: EventLog) -> tuple[list[Delivery[Event]], int]:
    """Every event of a namespace, and how many records were none. Leaves no trace in the log."""
    starts: dict[Partition, Start] = {
        Partition(placed.name, number): "first"
        for placed in log.topics
        if placed.topic is not DEAD_LETTERS
        for number in range(placed.partitions)
    }
    deliveries, undecodable = [], 0
    reader = log.broker.reader()
    try:
        positions, ends = await resolve_starts(log.broker, starts)
        behind = {place: end for place, end in ends.items() if positions[place] < end}
        await reader.assign({place: positions[place] for place in behind})
        while behind:
            for item in await reader.read():
                if isinstance(item, Record):
                    try:
                        deliveries.append(await log.decode(item))
                    except DecodeError:
                        undecodable += 1
                reached(item, behind)
    finally:
        await reader.close()
    return deliveries, undecodable


def examine(
    recipe: Recipe,
    deliveries: Iterable[Delivery[Event]],
    *,
    drained: bool = True,
    undecodable: int = 0,
) -> Report:
    """Judges a log. Deliveries of one partition come in offset order; `drained` as above."""
    facts = Facts.of(deliveries)
    batches = [one.event for one in facts.all(BatchAssembled)]
    newest: dict[str, int] = {}
    for published in facts.all(PolicyPublished):
        policy, version = published.event.policy, published.event.version
        newest[policy] = max(version, newest.get(policy, -1))
    return Report(
        violations=list(_violations(facts, recipe, drained=drained)),
        tasks=len(facts.tasks),
        tasks_ended=len(facts.all(TaskEnded)),
        episodes=len(facts.all(EpisodeStarted)),
        episodes_ended=len(facts.all(EpisodeEnded)),
        batches=dict(Counter(batch.policy for batch in batches)),
        versions=newest,
        trained=sum(len(batch.samples) for batch in batches),
        dropped=Counter(drop.reason for batch in batches for drop in batch.dropped),
        duplicates={kind.__name__: len(again) for kind, again in facts.again.items() if again},
        undecodable=undecodable,
    )


@dataclass
class Facts:
    """The events of a log, by type and id: the first of each, and those that repeat it."""

    tasks: dict[int, Delivery[TaskSubmitted]] = field(default_factory=dict)
    """By number. A task submitted twice is two tasks, the second of which is refused."""
    first: dict[type[Event], dict[str, Delivery[Any]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    again: dict[type[Event], list[Delivery[Any]]] = field(default_factory=lambda: defaultdict(list))
    places: dict[tuple[str, int, int], Delivery[Any]] = field(default_factory=dict)
    """By topic, partition and offset."""

    @classmethod
    def of(cls, deliveries: Iterable[Delivery[Event]]) -> Facts:
        """Sorts a log."""
        facts = cls()
        for one in deliveries:
            event, kind = one.event, type(one.event)
            facts.places[one.partition.topic, one.partition.number, one.offset] = one
            if isinstance(event, TaskSubmitted):
                facts.tasks[one.offset] = one  # type: ignore[assignment]
            elif event.event_id in facts.first[kind]:
                facts.again[kind].append(one)
            else:
                facts.first[kind][event.event_id] = one
        return facts

    def all(self, kind: type[E]) -> list[Delivery[E]]:
        """The first record of each id."""
        return list(self.first[kind].values())

    def get(self, kind: type[E], *identity: object) -> E | None:
        """The event that counts, by the fields of its id."""
        found = self.first[kind].get("/".join(map(str, identity)))
        return None if found is None else found.event

    def resolve(self, ref: Ref) -> Event | None:
        """What a reference names; None where that is absent, or is another record."""
        found = self.places.get((ref.topic, ref.partition, ref.offset))
        return None if found is None or found.ref.digest != ref.digest else found.event


def _violations(facts: Facts, recipe: Recipe, *, drained: bool) -> Violations:
    yield from _fenced_writers(facts)
    yield from _run(facts)
    yield from _task_ends(facts, drained=drained)
    yield from _episodes(facts, drained=drained)
    yield from _trajectories(facts)
    yield from _attempts(facts)
    yield from _groups(facts)
    for name, policy in recipe.policies.items():
        yield from _batches(facts, name, policy.batches.max_staleness)
        yield from _publications(facts, name)


def _fenced_writers(facts: Facts) -> Violations:
    """A sole writer that is fenced writes each id once."""
    for kind in (EpisodeStarted, BatchAssembled):
        for again in facts.again[kind]:
            yield f"{kind.__name__} {again.event.event_id} is in the log twice: fencing failed"


def _run(facts: Facts) -> Violations:
    states = [one.event.state for one in facts.all(RunStateEntered)]
    if states != ["started", "ending", "ended"][: len(states)]:
        yield f"the run's states are {states}"


def _task_ends(facts: Facts, *, drained: bool) -> Violations:
    """I1 for tasks."""
    ended = {one.event.task: one.event for one in facts.all(TaskEnded)}
    if drained:
        for task in sorted(facts.tasks.keys() - ended.keys()):
            yield f"task {task} was submitted and has no TaskEnded"
    for task in sorted(ended.keys() - facts.tasks.keys()):
        yield f"TaskEnded of task {task}, which nobody submitted"
    for again in facts.again[TaskEnded]:
        if again.event != ended[again.event.task]:
            yield f"task {again.event.task} has two TaskEnded that differ"
    started: dict[int, set[int]] = defaultdict(set)
    for start in facts.all(EpisodeStarted):
        started[start.event.task].add(start.event.sample)
    for task, event in ended.items():
        submitted = facts.tasks.get(task)
        if submitted is not None and submitted.event.task_id != event.task_id:
            yield f"task {task} was submitted as {submitted.event.task_id}: {event.task_id} ended"
        yield from _outcomes(facts, event, started[task])


def _outcomes(facts: Facts, ended: TaskEnded, started: set[int]) -> Violations:
    """A TaskEnded holds the outcome that counts of each sample that was started."""
    samples = [outcome.sample for outcome in ended.outcomes]
    if sorted(samples) != sorted(started):
        yield f"task {ended.task} started samples {sorted(started)}, ended {sorted(samples)}"
    for outcome in ended.outcomes:
        if outcome != facts.get(EpisodeEnded, ended.task, outcome.sample):
            yield f"task {ended.task}: its outcome of {outcome.sample} is not the one that counts"


def _episodes(facts: Facts, *, drained: bool) -> Violations:
    """I1 and I6 for episodes."""
    started: set[Episode] = {(o.event.task, o.event.sample) for o in facts.all(EpisodeStarted)}
    ended: set[Episode] = {(o.event.task, o.event.sample) for o in facts.all(EpisodeEnded)}
    if drained:
        for task, sample in sorted(started - ended):
            yield f"episode {task}/{sample} was started and has no EpisodeEnded"
    for task, sample in sorted(ended - started):
        yield f"EpisodeEnded of {task}/{sample}, which was never started"
    for task, _ in sorted(started):
        if task not in facts.tasks:
            yield f"an episode of task {task}, which nobody submitted"
    for one in facts.all(EpisodeEnded):
        yield from _reward(one.event)


def _reward(outcome: EpisodeEnded) -> Violations:
    name = f"episode {outcome.task}/{outcome.sample}"
    if outcome.reward is None:
        return
    if outcome.ending in NO_REWARD:
        yield f"{name} ended {outcome.ending} with reward {outcome.reward}"
    if outcome.failure is not None and outcome.failure.origin != "policy":
        yield f"{name} has reward {outcome.reward} after {outcome.failure.origin} failed"
    if outcome.trajectory is None:
        yield f"{name} has reward {outcome.reward} and no trajectory"


def _trajectories(facts: Facts) -> Violations:
    """I2, and I5 for tokens: of the trajectories that count."""
    published = {(one.event.policy, one.event.version) for one in facts.all(PolicyPublished)}
    for one in facts.all(EpisodeEnded):
        outcome = one.event
        if outcome.trajectory is None:
            continue
        name = f"episode {outcome.task}/{outcome.sample}"
        found = facts.resolve(outcome.trajectory)
        if not isinstance(found, TrajectoryRecorded):
            yield f"{name}: its trajectory's reference does not resolve"
            continue
        theirs = (found.task, found.sample, found.attempt, found.reward, found.ending)
        ours = (outcome.task, outcome.sample, outcome.attempt, outcome.reward, outcome.ending)
        if theirs != ours:
            yield f"{name} ended as {ours}, its trajectory as {theirs}"
        yield from _turns(facts, found, name)
        spoken = {(turn.policy, version) for turn in found.turns for version in _versions(turn)}
        for policy, version in sorted(spoken - published):
            yield f"{name} has tokens of {policy}/{version}, which was never published"


def _turns(facts: Facts, trajectory: TrajectoryRecorded, name: str) -> Violations:
    calls = [turn.call for turn in trajectory.turns]
    if len(set(calls)) != len(calls):
        yield f"{name}: a turn is doubled among {calls}"
    for index, turn in enumerate(trajectory.turns):
        if not -1 <= turn.parent < index:
            yield f"{name}: turn {index} follows turn {turn.parent}"
        identity = (trajectory.task, trajectory.sample, trajectory.attempt, turn.call)
        answer = facts.get(GenerationCompleted, *identity)
        if answer is None:
            yield f"{name}: turn {index} was never generated in attempt {trajectory.attempt}"
        elif (turn.tokens, turn.logprobs, turn.versions) != (
            answer.tokens,
            answer.logprobs,
            answer.versions,
        ):
            yield f"{name}: turn {index} is not the answer that counts to call {turn.call}"


def _attempts(facts: Facts) -> Violations:
    """I2: what an attempt asks of its environment is numbered without gaps."""
    indices: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for one in facts.all(ActionRequested):
        action = one.event
        if action.kind != "score":
            indices[action.task, action.sample, action.attempt].append(action.index)
    for (task, sample, attempt), found in indices.items():
        if sorted(found) != list(range(len(found))):
            yield f"episode {task}/{sample}, attempt {attempt}: its actions are {sorted(found)}"


def _groups(facts: Facts) -> Violations:
    """I6 and the references of the groups that count."""
    for one in facts.all(GroupClosed):
        group = one.event
        name = f"group {group.policy}/{group.task}"
        ended = facts.get(TaskEnded, group.task)
        if ended is None:
            yield f"{name} is of a task that has not ended"
            continue
        if group.verdict == "dropped":
            if not group.reason or group.samples:
                yield f"{name} is dropped for reason {group.reason!r}, with {len(group.samples)}"
            continue
        outcomes = {outcome.sample: outcome for outcome in ended.outcomes}
        samples = [sample.sample for sample in group.samples]
        excluded = [sample.sample for sample in group.excluded]
        if sorted(samples + excluded) != sorted(outcomes):
            yield f"{name} has samples {samples}, leaves out {excluded}, of {sorted(outcomes)}"
        for sample in group.samples:
            outcome = outcomes.get(sample.sample)
            if outcome is None or (sample.trajectory, sample.reward) != (
                outcome.trajectory,
                outcome.reward,
            ):
                yield f"{name}: sample {sample.sample} is not its outcome"
            elif sample.oldest_version != _oldest_version(facts, sample.trajectory, group.policy):
                yield f"{name}: sample {sample.sample} states the wrong oldest version"


def _oldest_version(facts: Facts, ref: Ref, policy: str) -> int | None:
    """The oldest version among a policy's sampled tokens in a trajectory."""
    trajectory = facts.resolve(ref)
    if not isinstance(trajectory, TrajectoryRecorded):
        return None
    spoken = [turn for turn in trajectory.turns if turn.policy == policy and turn.tokens]
    return min((version for turn in spoken for version in _versions(turn)), default=None)


def _versions(turn: Turn) -> list[int]:
    return unpack_spans(turn.versions, count(turn.tokens))


def _batches(facts: Facts, policy: str, max_staleness: int) -> Violations:
    """I3 and I5: what each batch decides."""
    frontier = Frontier()
    batches = [one.event for one in facts.all(BatchAssembled) if one.event.policy == policy]
    for number, batch in enumerate(batches, 1):
        name = f"batch {policy}/{batch.version}"
        if batch.version != number:
            yield f"{name} is number {number} in the log"
        after = Frontier(batch.low_mark, [(run.first, run.last) for run in batch.decided])
        deciding = {one.task for one in batch.samples} | {one.task for one in batch.dropped}
        if again := sorted(task for task in deciding if task in frontier):
            yield f"{name} decides {again}, which an earlier batch decided"
        for task in deciding:
            frontier.add(task)
        if (frontier.low_mark, frontier.runs) != (after.low_mark, after.runs):
            yield f"{name} is said to leave {after} decided: with what it holds it is {frontier}"
            frontier = after
        yield from _batch_samples(facts, batch, name, max_staleness)


def _batch_samples(
    facts: Facts, batch: BatchAssembled, name: str, max_staleness: int
) -> Violations:
    """Every sample of the groups that a batch decides is in it once, or dropped."""
    held: dict[int, list[int]] = defaultdict(list)
    for sample in batch.samples:
        held[sample.task].append(sample.sample)
        group = facts.get(GroupClosed, sample.task, batch.policy)
        ours = {one.sample: one for one in group.samples} if group is not None else {}
        one = ours.get(sample.sample)
        if one is None or one.trajectory != sample.trajectory:
            yield f"{name}: sample {sample.task}/{sample.sample} is not that of its group"
        elif (one.advantages, one.oldest_version) != (sample.advantages, sample.oldest_version):
            yield f"{name}: sample {sample.task}/{sample.sample} differs from its group's"
        if batch.version - 1 - sample.oldest_version > max_staleness:
            yield f"{name}: {sample.task}/{sample.sample} is of version {sample.oldest_version}"
        if sample.use != 0:
            yield f"{name}: {sample.task}/{sample.sample} is a replay, and none is known here"
    whole = set()
    for drop in batch.dropped:
        if not drop.reason:
            yield f"{name}: {drop.task}/{drop.sample} is dropped without a reason"
        if drop.sample < 0:
            whole.add(drop.task)
        else:
            held[drop.task].append(drop.sample)
    for task in whole & held.keys():
        yield f"{name}: task {task} is dropped as a whole, and in part"
    for task, samples in held.items():
        group = facts.get(GroupClosed, task, batch.policy)
        expected = sorted(one.sample for one in group.samples) if group is not None else []
        if task not in whole and sorted(samples) != expected:
            yield f"{name}: task {task} has samples {expected}, it holds {sorted(samples)}"


def _publications(facts: Facts, policy: str) -> Violations:
    """I5: versions grow by one, each from its batch."""
    records: Sequence[Delivery[PolicyPublished]] = sorted(
        [
            one
            for one in (*facts.all(PolicyPublished), *facts.again[PolicyPublished])
            if one.event.policy == policy
        ],
        key=lambda one: one.offset,
    )
    newest = -1
    for one in records:
        event = one.event
        name = f"version {policy}/{event.version}"
        if event.version == newest and event.status != "resumed":
            yield f"{name} is published twice, as {event.status}"
        elif event.version not in (newest, newest + 1):
            yield f"{name} is published after version {newest}"
        if (event.version == 0) != (event.status == "initial") and event.status != "resumed":
            yield f"{name} is published as {event.status}"
        if event.version > 0 and event.status != "resumed":
            batch = None if event.batch is None else facts.resolve(event.batch)
            if not isinstance(batch, BatchAssembled) or batch.version != event.version:
                yield f"{name} does not name the batch that trained it"
        newest = max(newest, event.version)
