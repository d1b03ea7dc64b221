"""I3 and I5 for tasks to evaluate: never trained on, and every token of the version pinned."""

from __future__ import annotations

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    GroupClosed,
    TrajectoryRecorded,
)
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.operate.verify.invariants.trajectory_checks import versions


def check(facts: Facts) -> Violations:
    """Judges all that belongs to tasks to evaluate, by what was submitted."""
    evaluated = {number for number, one in facts.tasks.items() if one.event.purpose == "evaluate"}
    for group in facts.events(GroupClosed):
        if group.task in evaluated and group.verdict != "dropped":
            yield f"I3: group {group.policy}/{group.task} is of a task to evaluate, and is scored"
    for batch in facts.events(BatchAssembled):
        for sample in batch.samples:
            if sample.task in evaluated:
                name = f"batch {batch.policy}/{batch.version}"
                yield f"I3: {name} trains on {sample.task}/{sample.sample}, which evaluates"
    for outcome in facts.events(EpisodeEnded):
        if outcome.task in evaluated and outcome.trajectory is not None:
            trajectory = facts.resolve(outcome.trajectory)
            if isinstance(trajectory, TrajectoryRecorded):
                yield from _pinned(facts, trajectory)


def _pinned(facts: Facts, trajectory: TrajectoryRecorded) -> Violations:
    name = f"episode {trajectory.task}/{trajectory.sample}"
    started = facts.get(EpisodeStarted, trajectory.task, trajectory.sample)
    if started is None:
        return
    roles = started.submitted.roles
    for turn in trajectory.turns:
        pinned, drawn = roles[turn.role].version, set(versions(turn))
        if pinned is None:
            yield f"I5: {name} evaluates no version: its role {turn.role} is not pinned"
        elif drawn - {pinned}:
            yield f"I5: {name} evaluates version {pinned}, and was drawn by {sorted(drawn)}"
