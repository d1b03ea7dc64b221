"""A policy and its teacher in a recipe: what fits together, and what the messages say."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.recipe.policy import DISTILL, REWARD_LOSSES
from headrace.schemas.recipe.recipe import Recipe
from headrace.trainer.losses.load_loss import LOSSES


def recipe(teacher: dict[str, Any] | None = None, **student: Any) -> Recipe:
    training = {"loss": "distill", "teacher": "big"} | student.pop("training", {})
    policies = {
        "small": {"model": "m", "training": training, **student},
        "big": {"model": "n", "training": None} | (teacher or {}),
    }
    tree = {"name": "a", "tasks": {"roles": {"policy": "small"}}, "policies": policies}
    return Recipe.model_validate(tree)


def test_a_teacher_is_a_policy_that_is_not_trained() -> None:
    training = recipe().policies["small"].training
    assert training is not None
    assert (training.teacher, training.teacher_s) == ("big", 600.0)


def test_every_built_in_loss_learns_from_rewards_or_from_a_teacher() -> None:
    assert {*REWARD_LOSSES, DISTILL} == set(LOSSES)


VLLM = {"engine": {"use": "vllm"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"teacher": None}}, "the loss 'distill' learns from a teacher"),
        ({"training": {"teacher": "huge"}}, r"no policy 'huge' among \['big', 'small'\]"),
        ({"training": {"teacher": "small"}}, "'small' is trained itself"),
        ({"teacher": {"training": {}}}, r"Set `training = false` in policies\.big"),
        ({"training": {"loss": "grpo"}}, "the loss 'grpo' does not use a teacher"),
        ({"training": {"teacher_s": 0}}, "greater than 0"),
        ({"groups": {"filters": ["zero_advantage"]}}, "drops groups with equal rewards"),
        ({"teacher": VLLM, "sampling": {"temperature": 0.7}}, "only what was sampled at temp"),
        ({"teacher": VLLM, "sampling": {"allowed": ["A"]}}, "without `allowed`"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": VLLM},
        {"training": {"loss": "mine:loss"}},
        {"training": {"loss": {"use": "distill", "reward_coefficient": 1.0}}},
        {"groups": {"filters": ["mine:filter"]}},
        {"sampling": {"temperature": 0.7, "allowed": ["A"]}},
    ],
)
def test_what_fits_is_read(changes: dict[str, Any]) -> None:
    assert recipe(**changes).policies["small"].training is not None
