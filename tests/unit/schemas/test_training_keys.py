"""Recipes of earlier releases, which runs have recorded, and plug-ins with options."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.recipe.policy import Groups, Training
from headrace.schemas.recipe.read_recipe import change_recipe
from headrace.schemas.recipe.recipe import Recipe

RECORDED = {"clip_low": 0.2, "clip_high": 0.2, "importance_cap": 2.0, "updates": 1, "loss": "grpo"}
"""What every recorded recipe of an earlier release has, with its defaults."""


@pytest.mark.parametrize(
    ("changed", "loss"),
    [
        ({}, "grpo"),
        ({"clip_high": 0.28}, {"use": "grpo", "clip_high": 0.28}),
        ({"loss": "mine:loss"}, "mine:loss"),
    ],
)
def test_a_recorded_recipe_is_read_with_the_options_of_its_loss(
    changed: dict[str, Any], loss: Any
) -> None:
    training = Training.model_validate({**RECORDED, "updates": 4, **changed})
    assert (training.loss, training.minibatches, training.epochs) == (loss, 4, 1)
    assert Training.model_validate(training.model_dump(mode="json")) == training


def test_a_clip_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"`clip_high` can't be set here.*loss = \{ use"):
        Training.model_validate({**RECORDED, "clip_high": 0.3, "loss": "gspo"})


def test_a_recorded_recipe_can_be_replayed_with_another_loss() -> None:
    training = {**RECORDED, "clip_high": 0.28}
    tree = {"name": "a", "policies": {"default": {"model": "m", "training": training}}}
    recipe = Recipe.model_validate(tree)
    key = "policies.default.training.loss"
    for setting, expected in (
        ("gspo", "gspo"),
        ('{ use = "gspo", clip_low = 0.1 }', {"use": "gspo", "clip_low": 0.1}),
        ('{"use": "cispo"}', "cispo"),
    ):
        changed = change_recipe(recipe, [f"{key}={setting}"]).policies["default"].training
        assert changed is not None
        assert changed.loss == expected


def test_a_table_must_name_its_plug_in() -> None:
    with pytest.raises(ValidationError, match="must name what it chooses"):
        Training.model_validate({"loss": {"clip_low": 0.1}})
    with pytest.raises(ValidationError, match="must name what it chooses"):
        Groups.model_validate({"filters": [{"use": 3}]})
