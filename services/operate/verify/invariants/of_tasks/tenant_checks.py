"""Whose tasks run, and who cancelled them, if the recipe names keys of tenants."""

from __future__ import annotations

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    RunStateEntered,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.log.event_log import Delivery
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations

UNPROVED = "unproved_tenant"


def unproved(trusted: TrustedKeys, task: Delivery[TaskSubmitted]) -> str:
    """Returns why a task does not count for its tenant; an empty text if it does."""
    return task.refusal(trusted, task.event.tenant)


def check(facts: Facts, recipe: Recipe) -> Violations:
    """Judges the starts of all tasks, and the ends of those that are cancelled."""
    trusted = recipe.scheduler.trusted
    if not trusted.keys:
        return
    refused: set[int] = set()
    for start in facts.all(EpisodeStarted):
        task, verdict = facts.tasks.get(start.event.task), start.event.verdict
        if task is None:
            continue  # Another check reports it.
        why, code = unproved(trusted, task), "" if verdict is None else verdict.code
        if why:
            refused.add(task.offset)
        if bool(why) != (code == UNPROVED):
            yield (
                f"I1: task {task.offset} of tenant {task.event.tenant} "
                + (f"is not refused: {why}" if why else "is refused, and its key has signed it")
            )
    if not any(one.state == "ending" for one in facts.events(RunStateEntered)):
        yield from _cancelled(facts, trusted, refused)


def _cancelled(facts: Facts, trusted: TrustedKeys, refused: set[int]) -> Violations:
    """Each cancelled episode has a cancellation by who may act for its tenant."""
    scopes: dict[tuple[str, str], set[str]] = {}
    for one in facts.in_order(TaskCancelled):
        named = one.event.source, one.event.task_id
        counts = trusted.scopes(one.signed_by(trusted.keys), one.event.tenant)
        scopes.setdefault(named, set()).update(counts)
    for ended in facts.events(EpisodeEnded):
        if ended.ending != "cancelled" or ended.task in refused:
            continue
        task = facts.tasks.get(ended.task)
        if task is None:
            continue
        event = task.event
        if trusted.scope(event.tenant) not in scopes.get((event.source, event.task_id), ()):
            yield f"I1: task {ended.task} is cancelled, and nobody of {event.tenant} has asked it"
