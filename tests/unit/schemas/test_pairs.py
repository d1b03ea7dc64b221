"""A loss that learns from pairs in a recipe: what fits together."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.recipe.recipe import Recipe


def recipe(samples: int = 8, **policy: Any) -> Recipe:
    policy["training"] = {"loss": "dpo"} | policy.get("training", {})
    tasks = {"roles": {"policy": "a"}, "samples": samples, "minimum": 1}
    policies = {"a": {"model": "m", **policy}}
    return Recipe.model_validate({"name": "r", "tasks": tasks, "policies": policies})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 1}, "of 1 samples in 1 minibatches no two"),
        ({"training": {"minibatches": 8}}, "of 8 samples in 8 minibatches no two"),
        (
            {"training": {"critic": {}}, "groups": {"advantage": "rewards"}},
            "a critic would replace them",
        ),
        (
            {"batches": {"groups": 4, "replay": {"share": 0.5, "weight": 0.5}}},
            "`dpo` does not weigh what it learns from pairs",
        ),
    ],
)
def test_what_leaves_no_pairs_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(**changes)


def test_two_samples_in_a_minibatch_are_enough() -> None:
    training = recipe(training={"minibatches": 7}).policies["a"].training
    assert training is not None
    assert training.has_reference
