from __future__ import annotations

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.submit.task_lines import read_tasks


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe("null")


def test_a_line_is_filled_up_from_the_recipe(recipe: Recipe) -> None:
    lines = ['{"item_id": "a", "payload": {"x": 1}, "samples": 3, "task_id": "t"}', "", "{}"]
    first, second = read_tasks(recipe, "me", lines)

    assert (first.source, first.task_id, first.item_id, first.samples) == ("me", "t", "a", 3)
    assert first.payload == '{"x": 1}'
    assert (second.samples, second.max_turns) == (recipe.tasks.samples, recipe.tasks.max_turns)


def test_ids_are_the_same_for_the_same_file(recipe: Recipe) -> None:
    lines = ["{}", "{}"]
    ids = [task.task_id for task in read_tasks(recipe, "me", lines)]

    assert ids == [task.task_id for task in read_tasks(recipe, "me", lines)]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2: Input should be an object"),
        ('{"sampels": 1}', "line 2: sampels: no such key"),
        ('{"samples": 0}', "line 2: samples: Input should be greater than 0"),
        ('{"samples": "8"}', "line 2: samples: Input should be a valid integer"),
    ],
)
def test_a_bad_line_is_named(recipe: Recipe, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_tasks(recipe, "me", ["{}", line])
