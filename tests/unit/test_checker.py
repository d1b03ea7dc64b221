"""The log checker finds what it is there to find."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from schemas.events import (
    BatchAssembled,
    BatchSample,
    Dropped,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GroupClosed,
    GroupSample,
    PolicyPublished,
    PolicyUse,
    Ref,
    Sampling,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
    Use,
)
from schemas.packed import pack_f32, pack_i32, pack_spans
from schemas.recipe import Recipe
from schemas.topics import Topics
from services.kafka.broker import Partition
from services.log import Delivery
from tests.checker import examine

TOPICS = Topics("test", ("default",), 1)
RECIPE = Recipe.model_validate({"name": "test", "policies": {"default": {"model": "tiny-llama"}}})
TOKENS: dict[str, Any] = {
    "tokens": pack_i32([7]),
    "logprobs": pack_f32([-0.5]),
    "versions": pack_spans([0]),
}
ADVANTAGE = pack_f32([1.0])


class Log:
    """A log under construction: what is written gets a place."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery[Event]] = []
        self._ends: dict[str, int] = {}

    def write(self, event: Event) -> Ref:
        topic = TOPICS.route(event).name
        offset = self._ends.get(topic, 0)
        self._ends[topic] = offset + 1
        digest = hashlib.sha256(repr(event).encode()).digest()[:16]
        ref = Ref(topic=topic, partition=0, offset=offset, digest=digest)
        self.deliveries.append(Delivery(event, ref, 1.0, Partition(topic, 0), offset))
        return ref

    def change(self, kind: type[Event], **changes: Any) -> None:
        """Changes the last event of a type where it lies, its reference kept."""
        at = max(n for n, one in enumerate(self.deliveries) if isinstance(one.event, kind))
        old = self.deliveries[at]
        event = old.event.model_copy(update=changes)
        self.deliveries[at] = Delivery(event, old.ref, 1.0, old.partition, old.offset)

    def again(self, kind: type[Event], **changes: Any) -> None:
        """Writes the last event of a type once more."""
        last = [one.event for one in self.deliveries if isinstance(one.event, kind)][-1]
        self.write(last.model_copy(update=changes))

    def without(self, kind: type[Event]) -> None:
        """Takes every event of a type out."""
        self.deliveries = [one for one in self.deliveries if not isinstance(one.event, kind)]


def whole_log() -> Log:
    """Two tasks of one sample: the first is trained on, the second's group is dropped."""
    log = Log()
    published: dict[str, Any] = {"policy": "default", "digest": bytes(32), "full_version": 0}
    log.write(PolicyPublished(version=0, status="initial", **published))
    samples, dropped = [], []
    for task in range(2):
        reference = write_task(log, task)
        group: dict[str, Any] = {"task": task, "policy": "default", "item_id": "0"}
        sizes: dict[str, Any] = {"tokens": 1, "longest": 1, "oldest_version": 0}
        sample: dict[str, Any] = {
            "sample": 0,
            "trajectory": reference,
            "advantages": ADVANTAGE,
            **sizes,
        }
        if task == 0:
            samples.append(BatchSample(task=task, **sample))
            scored = GroupSample(reward=1.0, **sample)
            log.write(GroupClosed(verdict="scored", samples=(scored,), **group))
        else:
            dropped.append(Dropped(task=task, reason="zero_advantage"))
            log.write(GroupClosed(verdict="dropped", reason="zero_advantage", **group))
    batch = log.write(
        BatchAssembled(
            policy="default",
            version=1,
            recipe=RECIPE.digest,
            seed=0,
            samples=tuple(samples),
            dropped=tuple(dropped),
            sampled_tokens=1,
            low_mark=2,
            groups_read=2,
        )
    )
    log.write(PolicyPublished(version=1, status="trained", batch=batch, **published))
    return log


def write_task(log: Log, task: int) -> Ref:
    """A task from its submission to its end, with reward 1. The trajectory's reference."""
    one: dict[str, Any] = {"source": "test", "task_id": str(task), "item_id": "0"}
    episode: dict[str, Any] = {"task": task, "sample": 0}
    use = Use(policy="default", sampling=Sampling(max_tokens=1))
    limits: dict[str, Any] = {"max_turns": 1, "max_tokens": 1, "deadline_s": 60}
    submitted = TaskSubmitted(agent="default", roles={"policy": use}, **one, **limits)
    log.write(submitted)
    log.write(EpisodeStarted(submitted=submitted, seed=0, deadline=60_000, **episode))
    answer: dict[str, Any] = {"call": "0", "policy": "default", **TOKENS}
    log.write(GenerationCompleted(digest=bytes(16), worker="w", finish="stop", **episode, **answer))
    end: dict[str, Any] = {"ending": "finished", "reward": 1.0, **episode}
    turns = (Turn(**answer),)
    trajectory = TrajectoryRecorded(agent="default", turns=turns, started=0, ended=1, **end, **one)
    reference = log.write(trajectory)
    spoken = PolicyUse(policy="default", tokens=1, longest=1, oldest_version=0)
    outcome = EpisodeEnded(item_id="0", trajectory=reference, policies=(spoken,), **end)
    log.write(outcome)
    log.write(TaskEnded(task=task, closed_by="all", outcomes=(outcome,), **one))
    return reference


def test_a_whole_log_has_no_violations_with_duplicates_neither() -> None:
    log = whole_log()
    for kind in (TaskEnded, EpisodeEnded, TrajectoryRecorded, GenerationCompleted, GroupClosed):
        log.again(kind)
    report = examine(RECIPE, log.deliveries)
    assert report.violations == []
    assert (report.tasks, report.tasks_ended, report.trained) == (2, 2, 1)
    assert report.versions == {"default": 1}
    assert report.duplicates["TaskEnded"] == 1


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda log: log.without(TaskEnded), "task 0 was submitted and has no TaskEnded"),
        (lambda log: log.without(EpisodeEnded), "0/0 was started and has no EpisodeEnded"),
        (lambda log: log.without(TaskSubmitted), "which nobody submitted"),
        (lambda log: log.without(EpisodeStarted), "which was never started"),
        (lambda log: log.without(TrajectoryRecorded), "reference does not resolve"),
        (lambda log: log.without(GenerationCompleted), "was never generated"),
        (lambda log: log.again(TaskEnded, closed_by="cancelled"), "two TaskEnded that differ"),
        (lambda log: log.again(EpisodeStarted), "fencing failed"),
        (lambda log: log.again(BatchAssembled), "fencing failed"),
        (lambda log: log.again(BatchAssembled, version=2), "decides [0, 1], which an earlier"),
        (lambda log: log.again(BatchAssembled, version=3), "is number 2 in the log"),
        (lambda log: log.change(BatchAssembled, low_mark=3), "is said to leave"),
        (lambda log: log.change(BatchAssembled, samples=(), low_mark=2), "is said to leave"),
        (lambda log: log.change(EpisodeEnded, ending="failed"), "ended failed with reward 1.0"),
        (lambda log: log.change(EpisodeEnded, reward=0.5), "its trajectory as"),
        (lambda log: log.change(GenerationCompleted, tokens=b""), "is not the answer that counts"),
        (lambda log: log.again(PolicyPublished), "is published twice"),
        (lambda log: log.again(PolicyPublished, version=3), "is published after version 1"),
        (lambda log: log.change(PolicyPublished, batch=None), "does not name the batch"),
    ],
)
def test_what_is_wrong_is_found(spoil: Callable[[Log], None], found: str) -> None:
    log = whole_log()
    spoil(log)
    violations = examine(RECIPE, log.deliveries).violations
    assert any(found in violation for violation in violations), violations


def test_a_sample_too_stale_is_found() -> None:
    log = whole_log()
    log.again(BatchAssembled, version=2, samples=(), dropped=())
    batch = next(one.event for one in log.deliveries if isinstance(one.event, BatchAssembled))
    log.again(BatchAssembled, version=3, samples=batch.samples)
    assert any("is of version 0" in one for one in examine(RECIPE, log.deliveries).violations)
