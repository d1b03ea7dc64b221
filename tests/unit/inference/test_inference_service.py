"""The engines that a recipe asks for."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.inference.service import make_engines, prepare


def recipe(**policies: dict[str, Any]) -> Recipe:
    """A recipe of scripted policies on the shipped tiny model."""
    tree = {
        "name": "test",
        "partitions": 2,
        "tasks": {"roles": {"policy": next(iter(policies))}},
        "policies": {
            name: {"model": "tiny-llama", "engine": {"use": "scripted", "slots": 4}} | settings
            for name, settings in policies.items()
        },
    }
    return parse_recipe(tree, "the test")


def test_policies_of_equal_settings_share_an_engine() -> None:
    engines = make_engines(
        recipe(left={}, right={}, other={"engine": {"use": "scripted", "slots": 5}}),
        ["left", "right", "other"],
    )
    assert [names for _, names in engines] == [["left", "right"], ["other"]]
    assert [engine.capacity().free_slots for engine, _ in engines] == [4, 5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arguments": {"tensor_parallel_size": 2}}, "is an option beside `arguments`"),
        ({"arguments": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size: Headrace can't"),
        ({"arguments": {"worker_cls": "a.B", "nnodes": 2}}, "nnodes, worker_cls: Headrace can't"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ],
)
def test_processes_of_vllm_that_headrace_does_not_end_are_refused_in_the_recipe(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        recipe(left={"engine": {"use": "vllm", "options": options}})
    assert recipe(left={"engine": {"use": "vllm", "options": {"tensor_parallel_size": 2}}})


def test_what_the_recipe_gets_wrong_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"no policy 'right'.*left"):
        make_engines(recipe(left={}), ["right"])
    with pytest.raises(UsageError, match=r"no engine 'warp'.*[uU]se openai, scripted, torch"):
        prepare(recipe(left={"engine": {"use": "warp"}}))
    with pytest.raises(UsageError, match="options of the scripted engine: a: no such key"):
        recipe(left={"engine": {"use": "scripted", "options": {"a": 1}}})
