"""The barrier in a recipe, and names of roles that clash with it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.version_barrier import held_at_barrier, others_of


def a_recipe(barrier: dict[str, Any] | None, **changes: Any) -> Recipe:
    policies: dict[str, Any] = {name: {"model": "tiny"} for name in ("a", "b", "c")}
    policies["frozen"] = {"model": "tiny", "training": False}
    tree = {"name": "r", "tasks": {"roles": {"a": "a"}}, "policies": policies, "barrier": barrier}
    return Recipe.model_validate(tree | changes)


def test_the_set_is_all_that_learn_or_those_that_are_named() -> None:
    assert others_of(a_recipe({}), "b") == ("a", "c")
    assert others_of(a_recipe({}), "frozen") == ()
    assert others_of(a_recipe(None), "b") == ()
    named = a_recipe({"policies": ["c", "a"]})
    assert [others_of(named, name) for name in ("a", "b", "c")] == [("c",), (), ("a",)]


@pytest.mark.parametrize(
    ("barrier", "why"),
    [
        ({"versions": 0}, "greater than 0"),
        ({"policies": ["a", "frozen"]}, "no policy 'frozen' learns"),
        ({"policies": ["a"]}, "at least two policies that learn"),
        ({"policies": ["a", "a"]}, "at least two policies that learn"),
    ],
)
def test_a_barrier_that_can_not_be_is_refused(barrier: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        a_recipe(barrier)


def test_a_role_is_not_named_like_a_judge() -> None:
    judge: dict[str, Any] = {"environments": {"default": {}, "judge": {}}}
    a_recipe(None, **judge)
    with pytest.raises(ValidationError, match=r"tasks.roles.judge: an environment has this name"):
        a_recipe(None, tasks={"roles": {"judge": "a"}}, **judge)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tasks": {"roles": {"overlong": "a"}}}, "is the penalty for length"),
        ({"tasks": {"roles": {"x": "a", "y": "a"}, "curators": ["greso"], "curated_by": "a"}},
         "'a' plays several roles, so the mean of its rewards says nothing"),
    ],
)  # fmt: skip
def test_a_role_with_a_reward_of_another_meaning_is_refused(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        a_recipe(None, **changes)


def test_samples_of_a_policy_in_several_roles_are_not_selected() -> None:
    selecting = {"model": "tiny", "groups": {"select": {"use": "best_of", "samples": 2}}}
    tree = {"name": "r", "policies": {"a": selecting}}
    Recipe.model_validate(tree | {"tasks": {"roles": {"x": "a"}}})
    with pytest.raises(ValidationError, match=r"policies.a.groups.select: the policy plays"):
        Recipe.model_validate(tree | {"tasks": {"roles": {"x": "a", "y": "a"}}})


def test_the_scheduler_ignores_the_room_of_those_that_wait() -> None:
    one = a_recipe({"versions": 1, "policies": ["a", "b"]})
    at_0 = {"a": 0, "b": 0, "c": 0}
    assert held_at_barrier(one, at_0, at_0) == set()
    assert held_at_barrier(one, at_0 | {"a": 1}, at_0) == {"a"}
    assert held_at_barrier(one, at_0 | {"a": 1, "b": 1}, at_0) == set(), "both are trained"
    assert held_at_barrier(one, at_0 | {"a": 1}, {"a": 0}) == {"a"}, "b has no version yet"
    assert held_at_barrier(a_recipe(None), at_0 | {"a": 9}, at_0) == set()
