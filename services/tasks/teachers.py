"""Checks that teachers can read what their students sample: the same token ids, and long enough."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.errors import UsageError
from headrace.schemas.recipe.learning.teacher import VLLM
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.tokens import same_vocabulary
from headrace.services.models.weights import model_folder


def teacher_of(policy: Policy) -> str | None:
    """Returns the name of a policy's teacher, if it has one."""
    return None if policy.training is None else policy.training.teacher


def check_teachers(recipe: Recipe) -> None:
    """Raises UsageError if a teacher's model can't score what its student's model samples."""
    for name, student in recipe.policies.items():
        teacher = teacher_of(student)
        if teacher is not None:
            _check(f"policies.{name}.training.teacher", student, recipe.policies[teacher])


def _check(key: str, student: Policy, teacher: Policy) -> None:
    folders = model_folder(student.model), model_folder(teacher.model)
    if not same_vocabulary(*folders):
        raise UsageError(
            f"{key}: {teacher.model} has other token ids than {student.model}, so it can't score "
            "what that samples. Choose a teacher with the same tokenizer"
        )
    sampled, read = (_context(*one) for one in zip((student, teacher), folders, strict=True))
    if read is not None and teacher.engine.use == VLLM:
        read -= 1  # vLLM draws a token after every prompt, even after one that it only scores.
    if sampled is not None and read is not None and read < sampled:
        raise UsageError(
            f"{key}: {teacher.model} scores {read} tokens, but a sequence of {student.model} may "
            f"have {sampled}. Set engine.options.context of the student to {read} or less, or "
            "choose a teacher with a longer context"
        )


def _context(policy: Policy, folder: Path) -> int | None:
    """Returns how many tokens a sequence may have, or None if only the engine knows that."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} has no usable config.json: {error!r}") from error
    limits = config.get("max_position_embeddings"), policy.engine.options.get("context")
    known = [limit for limit in limits if isinstance(limit, int)]
    return min(known, default=None)
