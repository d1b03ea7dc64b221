"""The recipe of an evaluation: the recipe's own tasks, and nothing that learns."""

from __future__ import annotations

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.operate.evaluate.evaluate import evaluation_recipe
from headrace.services.operate.run.children import services_of
from headrace.services.tasks.data_sets import items_by_epoch


def test_an_evaluation_runs_the_first_items_once_and_trains_nothing() -> None:
    tree = {
        "name": "r",
        "stop": {"reward": 0.5},
        "tasks": {"use": "count", "samples": 3},
        "policies": {"default": {"model": "tiny-llama"}},
        "evaluation": {"items": 5, "samples": 2, "temperature": 0, "seed": 9, "passing": 0.5},
    }
    derived = evaluation_recipe(parse_recipe(tree, "test"), {"default": "/weights"})
    policy, tasks = derived.policies["default"], derived.tasks
    assert (policy.training, policy.model, policy.sampling.temperature) == (None, "/weights", 0)
    assert (tasks.purpose, tasks.samples, tasks.seed, derived.stop.reward) == (
        "evaluate", 2, 9, None,
    )  # fmt: skip
    items = items_by_epoch(tasks.use, tasks.options, tasks.epochs)
    assert [item.item_id for _, _, item in items] == ["0", "1", "2", "3", "4"]
    assert not {"evaluation", "assemble-batches"} & set(services_of(derived))
