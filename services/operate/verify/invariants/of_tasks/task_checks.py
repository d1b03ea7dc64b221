"""I1 for tasks: each runs once, whole, in order, and has one TaskEnded of all its outcomes."""

from __future__ import annotations

from collections import defaultdict

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    RunStateEntered,
    TaskEnded,
    TaskSubmitted,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations
from headrace.services.operate.verify.invariants.of_tasks.tenant_checks import unproved

Starts = dict[int, list[Delivery[EpisodeStarted]]]
"""The starts that count, by task."""


def check(facts: Facts, recipe: Recipe, *, drained: bool) -> Violations:
    """Judges all tasks. `drained`: each must have ended."""
    starts: Starts = defaultdict(list)
    for start in facts.all(EpisodeStarted):
        starts[start.event.task].append(start)
    yield from _run(facts)
    yield from _fencing(facts)
    yield from _ends(facts, starts, drained=drained)
    for number, started in sorted(starts.items()):
        yield from _started(facts.tasks.get(number), number, [one.event for one in started])
    yield from _duplicates(facts, recipe, starts)
    yield from _order(starts)


def _run(facts: Facts) -> Violations:
    states = [one.state for one in facts.events(RunStateEntered)]
    if states != ["started", "ending", "ended"][: len(states)]:
        yield f"I1: the run's states are {states}"


def _fencing(facts: Facts) -> Violations:
    for again in facts.again[EpisodeStarted]:
        yield f"I1: EpisodeStarted {again.event.event_id} is in the log twice: fencing failed"


def _ends(facts: Facts, starts: Starts, *, drained: bool) -> Violations:
    ended = {event.task: event for event in facts.events(TaskEnded)}
    if drained:
        for task in sorted(facts.tasks.keys() - ended.keys()):
            yield f"I1: task {task} was submitted and has no TaskEnded"
    for task in sorted(ended.keys() - facts.tasks.keys()):
        yield f"I1: TaskEnded of task {task}, which nobody submitted"
    for again in facts.again[TaskEnded]:
        if again.event != ended[again.event.task]:
            yield f"I1: task {again.event.task} has two TaskEnded that differ"
    for event in ended.values():
        yield from _ended(facts, event, [one.event for one in starts.get(event.task, ())])


def _ended(facts: Facts, ended: TaskEnded, started: list[EpisodeStarted]) -> Violations:
    """A TaskEnded is of its task, and holds the outcome that counts of each sample started."""
    samples = [outcome.sample for outcome in ended.outcomes]
    expected = sorted(start.sample for start in started)
    if sorted(samples) != expected:
        yield f"I1: task {ended.task} started samples {expected}, ended {sorted(samples)}"
    for outcome in ended.outcomes:
        if outcome != facts.get(EpisodeEnded, ended.task, outcome.sample):
            name = f"task {ended.task}: its outcome of {outcome.sample}"
            yield f"I1: {name} is not the one that counts"
    if ended.closed_by != (expected_by := _closed_by(ended)):
        yield f"I1: task {ended.task} is closed by {ended.closed_by}, its outcomes: {expected_by}"
    if started:
        submitted = started[0].submitted
        theirs, ours = (_identity(one) for one in (submitted, ended))
        if theirs != ours:
            yield f"I1: task {ended.task} was submitted as {theirs}: {ours} ended"


def _closed_by(ended: TaskEnded) -> str:
    if any(outcome.ending == "cancelled" for outcome in ended.outcomes):
        return "cancelled"
    return "refused" if all(not outcome.attempts for outcome in ended.outcomes) else "all"


def _identity(one: TaskSubmitted | TaskEnded) -> tuple[object, ...]:
    return one.source, one.task_id, one.tenant, one.purpose, one.item_id, one.epoch, one.minimum


def _started(
    task: Delivery[TaskSubmitted] | None, number: int, started: list[EpisodeStarted]
) -> Violations:
    """A task starts whole and unchanged; what is refused, as one sample."""
    if task is None:
        yield f"I1: an episode of task {number}, which nobody submitted"
        return
    samples = sorted(start.sample for start in started)
    if samples != list(range(started[0].submitted.samples)):
        yield f"I1: task {number} has {started[0].submitted.samples} samples, started {samples}"
    for start in started:
        if start.verdict is None and not _as_submitted(start.submitted, task.event):
            yield f"I1: episode {number}/{start.sample} was started as another task"
        elif start.submitted.task_id != task.event.task_id[: len(start.submitted.task_id)]:
            yield f"I1: episode {number}/{start.sample} was refused as another task"


def _as_submitted(started: TaskSubmitted, submitted: TaskSubmitted) -> bool:
    """Whether a task is started as it was submitted; one to evaluate is pinned to versions."""
    if submitted.purpose == "train":
        return started == submitted
    roles = {
        role: use if use.version is not None else use.model_copy(update={"version": pinned.version})
        for role, use in submitted.roles.items()
        if (pinned := started.roles.get(role)) is not None and pinned.version is not None
    }
    return started == submitted.model_copy(update={"roles": roles})


def _duplicates(facts: Facts, recipe: Recipe, starts: Starts) -> Violations:
    """Of two submissions of one id within the window, the first runs and no other."""
    trusted = recipe.scheduler.trusted
    seen: dict[tuple[str, str, str], int] = {}
    for number in sorted(facts.tasks):
        event = facts.tasks[number].event
        if unproved(trusted, facts.tasks[number]):
            continue  # It takes no id.
        named = trusted.scope(event.tenant), event.source, event.task_id
        first = seen.setdefault(named, number)
        verdicts = [start.event.verdict for start in starts.get(number, ())]
        codes = {verdict.code for verdict in verdicts if verdict is not None}
        if first == number and "duplicate" in codes:
            yield f"I1: task {number} is refused as a duplicate, and is the first of its id"
        recent = number - first < recipe.scheduler.duplicates_window
        if first != number and recent and None in verdicts:
            yield f"I1: task {number} runs, and was submitted before as task {first}"


def _order(starts: Starts) -> Violations:
    """What runs was started in the order of submission: as far as a partition shows it."""
    newest: dict[tuple[int, str, str], int] = {}
    run = [one for started in starts.values() for one in started if one.event.verdict is None]
    for start in sorted(run, key=lambda one: (one.partition.number, one.offset)):
        submitted = start.event.submitted
        lane = start.partition.number, submitted.tenant, submitted.purpose
        before = newest.get(lane, -1)
        if start.event.task < before:
            yield f"I1: task {start.event.task} was started after task {before}"
        newest[lane] = max(before, start.event.task)
