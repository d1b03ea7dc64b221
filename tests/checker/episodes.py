"""I1 and I6 for episodes: each has one outcome, and a reward only where it earned one."""

from __future__ import annotations

from headrace.schemas.events import EpisodeEnded, EpisodeStarted, ObservationRecorded
from tests.checker.facts import Facts, Violations

NO_REWARD = ("failed", "deadline", "cancelled")
"""Endings from which nothing may be learned."""
BY_FAILURE = ("failed", "deadline")
"""Endings that say why."""


def check(facts: Facts, *, drained: bool) -> Violations:
    """Judges all episodes. `drained`: each must have ended."""
    starts = {(event.task, event.sample): event for event in facts.events(EpisodeStarted)}
    ends = {(event.task, event.sample): event for event in facts.events(EpisodeEnded)}
    if drained:
        for task, sample in sorted(starts.keys() - ends.keys()):
            yield f"I1: episode {task}/{sample} was started and has no EpisodeEnded"
    for task, sample in sorted(ends.keys() - starts.keys()):
        yield f"I1: EpisodeEnded of {task}/{sample}, which was never started"
    for key in sorted(starts.keys() & ends.keys()):
        yield from _end(starts[key], ends[key])
        yield from _reward(ends[key])
    for observation in facts.events(ObservationRecorded):
        failure = observation.failure
        if failure is not None and failure.origin != "policy" and observation.reward is not None:
            yield f"I6: observation {observation.event_id} has a reward, and {failure.code}"


def _end(started: EpisodeStarted, outcome: EpisodeEnded) -> Violations:
    name = f"episode {outcome.task}/{outcome.sample}"
    submitted = started.submitted
    theirs = (submitted.tenant, submitted.purpose, submitted.item_id, submitted.epoch)
    ours = (outcome.tenant, outcome.purpose, outcome.item_id, outcome.epoch)
    if theirs != ours:
        yield f"I1: {name} was started as {theirs}: {ours} ended"
    if started.verdict is not None:
        if (outcome.failure, outcome.attempts) != (started.verdict, 0):
            yield f"I1: {name} was started {started.verdict.code}, and was run"
        return
    if outcome.attempts > submitted.attempts:
        yield f"I1: {name} made {outcome.attempts} attempts of {submitted.attempts}"
    if outcome.attempts != outcome.attempt + 1:
        yield f"I1: {name} ended attempt {outcome.attempt} and counts {outcome.attempts}"
    failed = outcome.failure is not None
    if failed != (outcome.ending in BY_FAILURE) and outcome.ending != "cancelled":
        yield f"I6: {name} ended {outcome.ending} with failure {outcome.failure}"
    if outcome.trajectory is None and outcome.ending not in NO_REWARD:
        yield f"I2: {name} ended {outcome.ending} without a trajectory"


def _reward(outcome: EpisodeEnded) -> Violations:
    name = f"episode {outcome.task}/{outcome.sample}"
    if outcome.reward is None:
        return
    if outcome.ending in NO_REWARD:
        yield f"I6: {name} ended {outcome.ending} with reward {outcome.reward}"
    if outcome.failure is not None and outcome.failure.origin != "policy":
        yield f"I6: {name} has reward {outcome.reward} after {outcome.failure.origin} failed"
    if outcome.trajectory is None:
        yield f"I6: {name} has reward {outcome.reward} and no trajectory"
