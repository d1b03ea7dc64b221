"""Which tasks a recipe can't run, and why: a verdict on its episodes, and never an error of ours.

The scheduler asks before it starts a task. The agent worker asks again: a start comes from the
log, where another may have written it.
"""

from __future__ import annotations

import json

from headrace.schemas.events import Failure, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe

MAX_TASK_CHARACTERS = 1_000_000
"""Most of one task, written out: each of its episodes carries it whole, within a record's limit."""
MAX_SAMPLES = 4_096
"""Most samples of one task: they start in one transaction."""


def refusal(recipe: Recipe, submitted: TaskSubmitted) -> Failure | None:
    """Why this task can't be run by this recipe; None where it can."""
    if len(repr(submitted)) > MAX_TASK_CHARACTERS:
        return refused("too_large", f"more than {MAX_TASK_CHARACTERS} characters: use blobs")
    if submitted.agent not in recipe.agents:
        return refused("unknown_agent", f"no agent {submitted.agent!r} in the recipe")
    use = submitted.environment.use if submitted.environment else None
    if use is not None and use not in recipe.environments:
        return refused("unknown_environment", f"no environment {use!r} in the recipe")
    for role, played in submitted.roles.items():
        if played.policy not in recipe.policies:
            return refused("unknown_policy", f"role {role!r}: no policy {played.policy!r}")
    if not 1 <= submitted.samples <= MAX_SAMPLES:
        return refused("bad_task", f"samples is {submitted.samples}, not 1 to {MAX_SAMPLES}")
    limits = submitted.max_turns, submitted.max_tokens, submitted.deadline_s, submitted.attempts
    if min(limits) < 1:
        return refused("bad_task", "max_turns, max_tokens, deadline_s, attempts: from 1 up")
    return _bad_json(submitted)


def refused(code: str, message: str) -> Failure:
    """A verdict: the operator, or who submitted the task, must change something."""
    return Failure(origin="operator", code=code, message=message)


def _bad_json(submitted: TaskSubmitted) -> Failure | None:
    texts = {"payload": submitted.payload, "options": submitted.options}
    if submitted.environment is not None:
        texts["environment.options"] = submitted.environment.options
    for name, text in texts.items():
        try:
            fits = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            return refused("bad_task", f"{name} is no JSON object")
    return None
