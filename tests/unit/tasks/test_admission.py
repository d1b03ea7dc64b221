"""Which tasks a recipe can't run, whoever submits them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.events import EnvironmentUse, Sampling, TaskSubmitted, Use
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.tasks.admission import refusal

RECIPE = Recipe.model_validate(
    {
        "name": "r",
        "environments": {"default": {}, "judge": {}},
        "policies": {"default": {"model": "tiny"}},
    }
)


def a_task(role: str, **changes: Any) -> TaskSubmitted:
    return TaskSubmitted(
        source="team", task_id="1", item_id="1", agent="default", max_turns=1, max_tokens=1,
        deadline_s=1, environment=EnvironmentUse(use="default"),
        roles={role: Use(policy="default", sampling=Sampling(max_tokens=1))}, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("role", ["policy", "solver", "default"])
def test_a_role_may_have_any_name_of_its_own(role: str) -> None:
    assert refusal(RECIPE, a_task(role)) is None


@pytest.mark.parametrize("role", ["judge", "overlong"])
def test_a_role_must_not_get_what_a_judge_or_a_penalty_gives(role: str) -> None:
    failure = refusal(RECIPE, a_task(role))
    assert failure is not None
    assert failure.code == "bad_task"
    assert f"role {role!r}" in failure.message
