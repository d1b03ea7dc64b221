"""Puts the story of a task together from its facts. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GenerationRequested,
    GroupClosed,
    ObservationRecorded,
    PolicyPublished,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.services.agent.requests import Answer, Request
from headrace.services.operate.show.facts import Fact, of_type


@dataclass(slots=True)
class Exchange:
    """A request of an agent, and the answer."""

    call: str
    request: Fact[Request] | None = None
    answer: Fact[Answer] | None = None


@dataclass(slots=True)
class AttemptStory:
    """One attempt of an episode. Exchanges are kept for days, trajectories for longer."""

    attempt: int
    exchanges: list[Exchange] = field(default_factory=list)
    """In the order of the requests."""
    trajectory: Fact[TrajectoryRecorded] | None = None


@dataclass(slots=True)
class EpisodeStory:
    """One sample of a task."""

    sample: int
    started: Fact[EpisodeStarted] | None = None
    attempts: list[AttemptStory] = field(default_factory=list)
    outcome: Fact[EpisodeEnded] | None = None

    @property
    def counting(self) -> Fact[TrajectoryRecorded] | None:
        """The trajectory that counts, which is the one that the outcome names."""
        ref = None if self.outcome is None else self.outcome.event.trajectory
        found = (one.trajectory for one in self.attempts if one.trajectory is not None)
        return next((one for one in found if one.ref == ref), None)


@dataclass(frozen=True, slots=True)
class BatchUse:
    """What a batch did with the samples of a task."""

    location: str
    version: int
    trained: list[int]
    """The samples that it trains on."""
    dropped: dict[int, str]
    """The samples that it dropped, with the reasons. -1 stands for the whole task."""


@dataclass(slots=True)
class TaskTraining:
    """How one policy was trained on a task."""

    policy: str
    group: Fact[GroupClosed] | None = None
    batch: BatchUse | None = None
    """The batch that decided the task."""
    published: Fact[PolicyPublished] | None = None
    """The last publication of the batch's version."""


@dataclass(slots=True)
class TaskStory:
    """A task, from its submission to the version that was trained on it."""

    task: int
    submitted: Fact[TaskSubmitted] | None
    """None if retention removed it."""
    episodes: list[EpisodeStory]
    result: Fact[TaskEnded] | None
    policies: list[TaskTraining]
    duplicates: int
    """Records that repeat an earlier one. Readers ignore them."""
    remarks: list[str] = field(default_factory=list)
    """What could not be read."""


def make_task_story(
    number: int, facts: Sequence[Fact[Event]], sample: int | None = None
) -> TaskStory:
    """Makes the story of task `number`, or of one of its samples.

    The facts of a partition must be in offset order. If two have the same id, the first one counts.
    All batches and publications in `facts` must concern the task.
    """
    episodes: dict[int, EpisodeStory] = {}

    def episode(at: int) -> EpisodeStory:
        return episodes.setdefault(at, EpisodeStory(at))

    for started in of_type(facts, EpisodeStarted):
        episode(started.event.sample).started = started
    for outcome in of_type(facts, EpisodeEnded):
        episode(outcome.event.sample).outcome = outcome
    _add_attempts(facts, episodes)
    ids = [(type(fact.event), fact.event.event_id) for fact in facts]
    return TaskStory(
        number,
        next(of_type(facts, TaskSubmitted), None),
        [episodes[at] for at in sorted(episodes) if sample is None or at == sample],
        next(of_type(facts, TaskEnded), None),
        _policies(number, facts),
        duplicates=len(ids) - len(set(ids)),
    )


def _add_attempts(facts: Sequence[Fact[Event]], episodes: dict[int, EpisodeStory]) -> None:
    """Adds each request, answer and trajectory to its attempt."""
    attempts: dict[tuple[int, int], AttemptStory] = {}
    exchanges: dict[tuple[int, int, str], Exchange] = {}

    def attempt(event: Request | Answer | TrajectoryRecorded) -> AttemptStory:
        key = (event.sample, event.attempt)
        if key not in attempts:
            attempts[key] = AttemptStory(event.attempt)
            episode = episodes.setdefault(event.sample, EpisodeStory(event.sample))
            episode.attempts.append(attempts[key])
            episode.attempts.sort(key=lambda one: one.attempt)
        return attempts[key]

    def exchange(event: Request | Answer) -> Exchange:
        key = (event.sample, event.attempt, event.call)
        if key not in exchanges:
            exchanges[key] = Exchange(event.call)
            attempt(event).exchanges.append(exchanges[key])
        return exchanges[key]

    for prompt in of_type(facts, GenerationRequested):
        exchange(prompt.event).request = prompt
    for action in of_type(facts, ActionRequested):
        exchange(action.event).request = action
    for generation in of_type(facts, GenerationCompleted):
        exchange(generation.event).answer = generation
    for observation in of_type(facts, ObservationRecorded):
        exchange(observation.event).answer = observation
    for trajectory in of_type(facts, TrajectoryRecorded):
        attempt(trajectory.event).trajectory = trajectory
    for one in attempts.values():
        one.exchanges.sort(key=_requested_at)


def _requested_at(exchange: Exchange) -> tuple[float, str]:
    known = exchange.request or exchange.answer
    return (known.recorded_at if known else 0.0, exchange.call)


def _policies(task: int, facts: Sequence[Fact[Event]]) -> list[TaskTraining]:
    """Returns each policy's group, its batch, and the last publication of the batch's version."""
    found: dict[str, TaskTraining] = {}
    for group in of_type(facts, GroupClosed):
        found.setdefault(group.event.policy, TaskTraining(group.event.policy)).group = group
    for batch in of_type(facts, BatchAssembled):
        event = batch.event
        found.setdefault(event.policy, TaskTraining(event.policy)).batch = BatchUse(
            batch.location,
            event.version,
            [one.sample for one in event.samples if one.task == task],
            {one.sample: one.reason for one in event.dropped if one.task == task},
        )
    for published in of_type(facts, PolicyPublished):
        one = found.get(published.event.policy)
        if one and one.batch and one.batch.version == published.event.version:
            one.published = published
    return [found[policy] for policy in sorted(found)]
