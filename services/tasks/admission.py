"""Refuses tasks that a recipe can't run. The reason is the verdict on their episodes.

The scheduler checks a task before it starts it. The agent worker checks it again, because another
program may have written the start to the log.
"""

from __future__ import annotations

import json

from headrace.schemas.events import Failure, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.role_rewards import OVERLONG

MAX_TASK_CHARACTERS = 1_000_000
"""Maximum length of a task as text. Each of its episodes carries the whole task in one record."""
MAX_SAMPLES = 4_096
"""Maximum number of samples of a task. They start in one transaction."""


def refusal(recipe: Recipe, submitted: TaskSubmitted) -> Failure | None:
    """Returns why this recipe can't run this task, or None if it can."""
    if len(repr(submitted)) > MAX_TASK_CHARACTERS:
        return refused("too_large", f"the task has more than {MAX_TASK_CHARACTERS} characters")
    if submitted.agent not in recipe.agents:
        return refused("unknown_agent", f"no agent {submitted.agent!r} in the recipe")
    use = submitted.environment.use if submitted.environment else None
    if use is not None and use not in recipe.environments:
        return refused("unknown_environment", f"no environment {use!r} in the recipe")
    for role, played in submitted.roles.items():
        if played.policy not in recipe.policies:
            return refused(
                "unknown_policy", f"role {role!r}: no policy {played.policy!r} in the recipe"
            )
        if role == OVERLONG or (role in recipe.environments and role != use):
            return refused(
                "bad_task",
                f"role {role!r}: a penalty or a judge gives a reward of this name. Rename the role",
            )
    if not 1 <= submitted.samples <= MAX_SAMPLES:
        return refused("bad_task", f"samples is {submitted.samples}, not 1 to {MAX_SAMPLES}")
    limits = submitted.max_turns, submitted.max_tokens, submitted.deadline_s, submitted.attempts
    if min(limits) < 1:
        return refused(
            "bad_task", "max_turns, max_tokens, deadline_s and attempts must be at least 1"
        )
    return _bad_json(submitted)


def refused(code: str, message: str) -> Failure:
    """Returns a verdict that the operator or the submitter of the task must act on."""
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
            return refused("bad_task", f"{name} is not a JSON object")
    return None
