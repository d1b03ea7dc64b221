"""The story of a task, put together from its facts. Pure: no log, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from headrace.services.operate.show.facts import Fact, of_type

Request = GenerationRequested | ActionRequested
Answer = GenerationCompleted | ObservationRecorded


@dataclass(slots=True)
class Exchange:
    """What an agent asked, and what came back."""

    call: str
    request: Fact[Request] | None = None
    answer: Fact[Answer] | None = None

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {"call": self.call, "request": _tree(self.request), "answer": _tree(self.answer)}


@dataclass(slots=True)
class AttemptStory:
    """One attempt of an episode. The exchanges are kept for days, the trajectory for longer."""

    number: int
    exchanges: list[Exchange] = field(default_factory=list)
    """In the order in which they were asked."""
    trajectory: Fact[TrajectoryRecorded] | None = None

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "attempt": self.number,
            "exchanges": [one.to_tree() for one in self.exchanges],
            "trajectory": _tree(self.trajectory),
        }


@dataclass(slots=True)
class EpisodeStory:
    """One sample of a task."""

    sample: int
    started: Fact[EpisodeStarted] | None = None
    attempts: list[AttemptStory] = field(default_factory=list)
    outcome: Fact[EpisodeEnded] | None = None

    @property
    def counting(self) -> Fact[TrajectoryRecorded] | None:
        """The trajectory that counts: the one that the outcome names."""
        ref = None if self.outcome is None else self.outcome.event.trajectory
        found = (one.trajectory for one in self.attempts if one.trajectory is not None)
        return next((one for one in found if one.ref == ref), None)

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sample": self.sample,
            "started": _tree(self.started),
            "attempts": [one.to_tree() for one in self.attempts],
            "outcome": _tree(self.outcome),
        }


@dataclass(slots=True)
class LearnedIn:
    """What one policy made of a task."""

    policy: str
    group: Fact[GroupClosed] | None = None
    batch: Fact[BatchAssembled] | None = None
    """The batch that decided the task."""
    published: Fact[PolicyPublished] | None = None
    """The last publication of the version that the batch trained."""

    def use(self, task: int) -> dict[str, Any]:
        """How the batch decided: the samples trained, and what it dropped of the task, and why."""
        if self.batch is None:
            return {}
        batch = self.batch.event
        return {
            "trained": [one.sample for one in batch.samples if one.task == task],
            "dropped": {one.sample: one.reason for one in batch.dropped if one.task == task},
        }

    def to_tree(self, task: int) -> dict[str, Any]:
        """For JSON. Of the batch, only what concerns the task."""
        batch = None
        if self.batch is not None:
            event = self.batch.event
            batch = {"place": self.batch.place, "version": event.version, **self.use(task)}
        return {
            "policy": self.policy,
            "group": _tree(self.group),
            "batch": batch,
            "published": _tree(self.published),
        }


@dataclass(slots=True)
class TaskStory:
    """A task from its submission to the version that it helped to make."""

    number: int
    submitted: Fact[TaskSubmitted] | None
    """None where retention removed it."""
    episodes: list[EpisodeStory]
    result: Fact[TaskEnded] | None
    learned: list[LearnedIn]
    duplicates: int
    """Records that say again what was said before: no reader counts them."""
    remarks: list[str] = field(default_factory=list)
    """What could not be read."""

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "task": self.number,
            "submitted": _tree(self.submitted),
            "episodes": [one.to_tree() for one in self.episodes],
            "result": _tree(self.result),
            "policies": [one.to_tree(self.number) for one in self.learned],
            "duplicates": self.duplicates,
            "remarks": self.remarks,
        }


def tell_task(number: int, facts: Sequence[Fact[Event]], sample: int | None = None) -> TaskStory:
    """The story of task `number`, or of one sample. Facts of one partition in offset order.

    Of two facts with one id the first counts. A batch or publication in `facts` is of the task.
    """
    episodes: dict[int, EpisodeStory] = {}

    def episode(at: int) -> EpisodeStory:
        return episodes.setdefault(at, EpisodeStory(at))

    for started in of_type(facts, EpisodeStarted):
        episode(started.event.sample).started = started
    for outcome in of_type(facts, EpisodeEnded):
        episode(outcome.event.sample).outcome = outcome
    _add_attempts(facts, episodes)
    submitted = next(of_type(facts, TaskSubmitted), None)
    ids = [(type(fact.event), fact.event.event_id) for fact in facts]
    return TaskStory(
        number,
        submitted,
        [episodes[at] for at in sorted(episodes) if sample is None or at == sample],
        next(of_type(facts, TaskEnded), None),
        _learned(facts),
        duplicates=len(ids) - len(set(ids)),
    )


def _add_attempts(facts: Sequence[Fact[Event]], episodes: dict[int, EpisodeStory]) -> None:
    """Requests, answers and trajectories, each to its attempt."""
    attempts: dict[tuple[int, int], AttemptStory] = {}
    exchanges: dict[tuple[int, int, str], Exchange] = {}

    def attempt(event: Request | Answer | TrajectoryRecorded) -> AttemptStory:
        key = (event.sample, event.attempt)
        if key not in attempts:
            attempts[key] = AttemptStory(event.attempt)
            episode = episodes.setdefault(event.sample, EpisodeStory(event.sample))
            episode.attempts.append(attempts[key])
            episode.attempts.sort(key=lambda one: one.number)
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
        one.exchanges.sort(key=_asked_at)


def _asked_at(exchange: Exchange) -> tuple[float, str]:
    known = exchange.request or exchange.answer
    return (known.recorded_at if known else 0.0, exchange.call)


def _learned(facts: Sequence[Fact[Event]]) -> list[LearnedIn]:
    """Per policy: group, batch, and the last publication of the batch's version."""
    learned: dict[str, LearnedIn] = {}
    for group in of_type(facts, GroupClosed):
        learned.setdefault(group.event.policy, LearnedIn(group.event.policy)).group = group
    for batch in of_type(facts, BatchAssembled):
        learned.setdefault(batch.event.policy, LearnedIn(batch.event.policy)).batch = batch
    for published in of_type(facts, PolicyPublished):
        one = learned.get(published.event.policy)
        if one and one.batch and one.batch.event.version == published.event.version:
            one.published = published
    return [learned[policy] for policy in sorted(learned)]


def _tree(fact: Fact[Event] | None) -> dict[str, Any] | None:
    return None if fact is None else fact.to_tree()
