"""The overview of a run, and its curves."""

from __future__ import annotations

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.run_views import _policy_tree, series_tree
from tests.unit.operate.test_evaluation import ended

RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "tasks": {"samples": 2, "environment": "default", "purpose": "evaluate"},
        "environments": {"default": {"use": "null"}},
        "policies": {"default": {"model": "tiny-llama", "training": None}},
    }
)


def test_an_evaluation_without_a_sample_that_counts_has_no_figures() -> None:
    """The page draws the mean and its interval of every evaluation that it gets."""
    index = RunIndex(RECIPE)
    assert index.progress.evaluations.of("default")
    assert _policy_tree(index, "default")["evaluation"] is None
    assert series_tree(index, {})["evaluation"] == []


def test_the_newest_evaluation_with_a_sample_that_counts_is_shown() -> None:
    index = RunIndex(RECIPE)
    evaluations = index.progress.evaluations
    evaluations.on_task_ended(ended(1.0, 0.0, version=3))
    evaluations.on_task_ended(ended(None, None, version=4, versions={"default": 4}))
    assert mean(index) == (3, 0.5)
    assert len(series_tree(index, {})["evaluation"]) == 1
    evaluations.on_task_ended(ended(1.0, 1.0, version=3, task_id="other"))
    assert mean(index) == (3, 0.75)


def mean(index: RunIndex) -> tuple[int, float]:
    found = _policy_tree(index, "default")["evaluation"]
    return found["version"], found["avg"]["value"]
