"""Checks that a policy and its teacher in a recipe fit together, as far as the recipe shows it."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.schemas.recipe.policy import DISTILL, REWARD_LOSSES, Policy, Training
from headrace.schemas.recipe.tables import use_and_options

ZERO_ADVANTAGE = "zero_advantage"
VLLM = "vllm"


def check_teacher(
    name: str, student: Policy, training: Training, policies: Mapping[str, Policy]
) -> None:
    """Raises ValueError if the policy `name` can't learn from its teacher, or lacks one."""
    loss, _ = use_and_options(training.loss)
    teacher = training.teacher
    if teacher is None:
        if loss == DISTILL:
            raise ValueError(
                f"{name}.training: the loss {DISTILL!r} learns from a teacher. Set `teacher` to "
                "the name of a policy with `training = false`"
            )
        return
    key = f"{name}.training.teacher"
    if teacher not in policies:
        raise ValueError(f"{key}: no policy {teacher!r} among {sorted(policies)}")
    if policies[teacher].training is not None:
        raise ValueError(
            f"{key}: {teacher!r} is trained itself, but a teacher must not change. Set "
            f"`training = false` in policies.{teacher}"
        )
    if loss in REWARD_LOSSES and not training.external:  # Only our own trainer reads the loss.
        raise ValueError(
            f"{key}: the loss {loss!r} does not use a teacher. Set loss = {DISTILL!r}, or remove "
            "`teacher`"
        )
    if any(use_and_options(one)[0] == ZERO_ADVANTAGE for one in student.groups.filters):
        raise ValueError(
            f"{name}.groups.filters: {ZERO_ADVANTAGE!r} drops groups with equal rewards, but their "
            "teacher teaches something about them, too. Remove the filter"
        )
    sampling = student.sampling
    changed = sampling.temperature != 1 or sampling.allowed or sampling.json_schema
    if policies[teacher].engine.use == VLLM and changed:
        raise ValueError(
            f"{key}: the engine 'vllm' of {teacher!r} scores only what was sampled at temperature "
            f"1, without `allowed` and `json_schema`. Change {name}.sampling, or give {teacher!r} "
            "the engine 'torch'"
        )
