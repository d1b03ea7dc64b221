"""Files and labels: those of the attempt that counts, and of no other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from headrace.schemas.events import (
    ActionRequested,
    Blob,
    EpisodeEnded,
    EpisodeStarted,
    ObservationRecorded,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.tasks.admission import own_labels

Attempt = tuple[int, int, int]
"""Task, sample, attempt."""


def check(facts: Facts) -> Violations:
    """Judges the files and labels of all episodes and tasks."""
    starts = {(event.task, event.sample): event for event in facts.events(EpisodeStarted)}
    given: dict[Attempt, dict[str, set[Blob]]] = defaultdict(lambda: defaultdict(set))
    collected: dict[Attempt, ObservationRecorded] = {}
    for one in facts.events(ObservationRecorded):
        attempt = (one.task, one.sample, one.attempt)
        for action in facts.every(ActionRequested, one.event_id):
            if action.digest != one.digest:
                continue
            judge = f"{action.environment.use}/" if action.kind == "score" else ""
            for blob in one.artifacts:
                named = blob.model_copy(update={"name": judge + blob.name})
                given[attempt][named.name].add(named)
            if action.kind == "collect":
                collected[attempt] = one
    for outcome in facts.events(EpisodeEnded):
        started = starts.get((outcome.task, outcome.sample))
        if started is not None:
            yield from _outcome(facts, started, outcome, given, collected)
    for ended in facts.events(TaskEnded):
        task = facts.tasks.get(ended.task)
        if task is not None and ended.closed_by == "all" and ended.labels != own_labels(task.event):
            yield f"I1: task {ended.task} ended with the labels {ended.labels}"


def _outcome(
    facts: Facts,
    started: EpisodeStarted,
    outcome: EpisodeEnded,
    given: Mapping[Attempt, Mapping[str, set[Blob]]],
    collected: Mapping[Attempt, ObservationRecorded],
) -> Violations:
    name = f"episode {outcome.task}/{outcome.sample}"
    if outcome.attempts and outcome.labels != own_labels(started.submitted):
        yield f"I1: {name} ended with the labels {outcome.labels}"
    found = None if outcome.trajectory is None else facts.resolve(outcome.trajectory)
    if not isinstance(found, TrajectoryRecorded):
        if outcome.artifacts and outcome.trajectory is None:
            yield f"I2: {name} has files and no trajectory"
        return
    if outcome.artifacts != found.artifacts:
        yield f"I2: {name} has other files than its trajectory"
    attempt = (found.task, found.sample, found.attempt)
    theirs = given.get(attempt, {})
    for blob in found.artifacts:
        if blob not in theirs.get(blob.name, set()):
            yield f"I2: {name} has a file {blob.name!r} that its attempt did not give out"
    use = started.submitted.environment
    if outcome.failure is not None or use is None or not use.collect:
        return
    if found.ending not in ("finished", "turn_limit", "token_limit", "overflow"):
        return
    answer = collected.get(attempt)
    if answer is None or answer.failure is not None:
        yield f"I6: {name} ended {found.ending}, and its files were not collected"
    elif not set(answer.artifacts) <= set(found.artifacts):
        yield f"I2: {name} lacks files that were collected"
