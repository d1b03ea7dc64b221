"""What the log says when all is over, held against what Headrace promises."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, TypeVar

from schemas import packed
from schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GroupClosed,
    ObservationRecorded,
    PolicyPublished,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from schemas.recipe import Recipe
from schemas.topics import DEAD_LETTERS, TOPICS
from services.kafka.broker import Partition
from services.log import CaughtUp, Delivery, EventLog, EventReader
from tests.flow.world import reward, where

E = TypeVar("E", bound=Event)


@dataclass
class History:
    """All events of a run, in log order within a partition."""

    deliveries: list[Delivery[Event]]
    first: dict[type[Event], dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """The records that count: the first of each id."""

    def __post_init__(self) -> None:
        for delivery in self.deliveries:
            event = delivery.event
            self.first[type(event)].setdefault(event.event_id, event)

    def of(self, kind: type[E]) -> list[E]:
        """All events of a kind that count."""
        return list(self.first[kind].values())

    def all(self, kind: type[E]) -> list[Delivery[E]]:
        """All events of a kind, repetitions included."""
        return [one for one in self.deliveries if type(one.event) is kind]  # type: ignore[misc]


async def read_history(log: EventLog) -> History:
    """Reads every topic of the namespace to its end."""
    places = [
        Partition(placed.name, number)
        for placed in log.topics
        if placed.topic is not DEAD_LETTERS
        for number in range(placed.partitions)
    ]
    reader = EventReader(log, dict.fromkeys(places, "first"))
    deliveries = []
    async for item in reader:
        if isinstance(item, CaughtUp):
            break
        deliveries.append(item)
    await reader.aclose()
    assert len(places) >= len(TOPICS) - 1
    return History(deliveries)


def drained(history: History, recipe: Recipe) -> bool:
    """Whether all tasks of the recipe's source are decided, and all batches trained on."""
    items = recipe.tasks.options["items"]
    batches, published = history.of(BatchAssembled), history.of(PolicyPublished)
    submitted = len(history.all(TaskSubmitted))
    return (
        len(history.of(TaskSubmitted)) >= items
        and len(history.of(TaskEnded)) >= submitted
        and max((batch.low_mark for batch in batches), default=0) >= submitted
        and max((one.version for one in published), default=-1)
        >= max((batch.version for batch in batches), default=0)
    )


async def check(history: History, log: EventLog, recipe: Recipe) -> None:
    """Raises AssertionError where a promise is broken."""
    _check_tasks(history, recipe)
    await _check_trajectories(history, log)
    _check_training(history, recipe)


def _check_tasks(history: History, recipe: Recipe) -> None:
    """I1: each task and each episode ends in one record that counts, and nothing vanishes."""
    outcomes = history.first[EpisodeEnded]
    ended = {task.task: task for task in history.of(TaskEnded)}
    submitted = {one.offset: one.event for one in history.all(TaskSubmitted)}
    assert sorted(ended) == sorted(submitted)
    for number, task in ended.items():
        samples = sorted(outcome.sample for outcome in task.outcomes)
        refused = task.closed_by == "refused"
        assert samples == list(range(1 if refused else submitted[number].samples))
        for outcome in task.outcomes:
            assert outcome == outcomes[outcome.event_id], f"{outcome.event_id} is not the first"
            assert (outcome.attempts == 0) == refused
            if outcome.failure is not None and outcome.failure.origin == "infrastructure":
                assert outcome.reward is None  # I6
    started = {(start.task, start.sample) for start in history.of(EpisodeStarted)}
    assert len(history.all(EpisodeStarted)) == len(started), "a start was written twice"
    assert started == {(outcome.task, outcome.sample) for outcome in history.of(EpisodeEnded)}


async def _check_trajectories(history: History, log: EventLog) -> None:
    """I2: a counting trajectory is whole: what was said and seen in one attempt, in order."""
    for outcome in history.of(EpisodeEnded):
        if outcome.trajectory is None:
            assert outcome.ending != "finished"
            continue
        (trajectory,) = await log.fetch([outcome.trajectory])
        assert isinstance(trajectory, TrajectoryRecorded)
        here = trajectory.task, trajectory.sample, trajectory.attempt
        assert here == (outcome.task, outcome.sample, outcome.attempt)
        assert trajectory.reward == outcome.reward
        if trajectory.ending == "finished":
            _check_story(trajectory)
        said = {
            (one.event.call, one.event.tokens)
            for one in history.all(GenerationCompleted)
            if (one.event.task, one.event.sample, one.event.attempt) == here
        }
        assert {(turn.call, turn.tokens) for turn in trajectory.turns} <= said


def _check_story(trajectory: TrajectoryRecorded) -> None:
    """What was seen follows from what was done, and so does the reward: nothing lost or doubled."""
    path, earned = f"{trajectory.task}/{trajectory.sample}", 0.0
    for index, turn in enumerate(trajectory.turns):
        assert turn.parent == index - 1
        assert bytes(packed.unpack_i32(turn.context)).decode() == where(path)
        path += f"/{turn.text}"
        earned += reward(path)
        assert turn.reward == reward(path)
    assert len(trajectory.turns) == 3
    assert trajectory.reward == earned


def _check_training(history: History, recipe: Recipe) -> None:
    """I3 and I5: each sample is trained once or dropped with a reason; versions are in order."""
    batches = [one.event for one in history.all(BatchAssembled)]
    versions = [one.event.version for one in history.all(PolicyPublished)]
    assert [batch.version for batch in batches] == list(range(1, len(batches) + 1))
    assert versions == list(range(len(batches) + 1))
    trained = [(s.task, s.sample) for batch in batches for s in batch.samples]
    assert len(trained) == len(set(trained)), "a sample is in two batches"
    dropped = {(d.task, d.sample) for batch in batches for d in batch.dropped}
    whole = {task for task, sample in dropped if sample == -1}
    for group in history.of(GroupClosed):
        left_out = {excluded.sample for excluded in group.excluded}
        for sample in group.samples:
            key = group.task, sample.sample
            assert (key in trained) + (key in dropped or group.task in whole) == 1
            assert sample.sample not in left_out
    staleness = recipe.policies["default"].batches.max_staleness
    for batch in batches:
        for one in batch.samples:
            assert batch.version - 1 - one.oldest_version <= staleness


def attempts_lost(history: History) -> int:
    """Attempts that the infrastructure cost."""
    return sum(outcome.attempts - 1 for outcome in history.of(EpisodeEnded) if outcome.attempts)


def endings(history: History) -> dict[str, int]:
    """How many episodes ended how."""
    counts: dict[str, int] = defaultdict(int)
    for outcome in history.of(EpisodeEnded):
        counts[outcome.failure.code if outcome.failure else outcome.ending] += 1
    return dict(counts)


__all__ = ["History", "ObservationRecorded", "attempts_lost", "check", "drained", "endings",
           "read_history"]  # fmt: skip
