"""Tasks wait while their environment or image has as many live episodes as it may have."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.schemas.events import EnvironmentUse, LimitSet, TaskSubmitted
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.services.scheduler.core import SchedulerCore
from headrace.services.scheduler.environment_room import EnvironmentRoom
from headrace.services.scheduler.lanes import Tenants
from headrace.services.scheduler.waiting_tasks import WaitingTask
from headrace.services.tasks.task_maker import Item, TaskMaker


def a_recipe(samples: int = 1, **scheduler: Any) -> Recipe:
    """A run that only evaluates, so that no version and no room is needed."""
    return parse_recipe(
        {
            "name": "test",
            "tasks": {"samples": samples, "environment": "shell"},
            "environments": {"shell": {"use": "null", "options": {"image": "a"}}, "other": {}},
            "scheduler": {"live_episodes": 100, "require_reports": False, **scheduler},
            "policies": {"default": {"model": "tiny-llama", "training": False}},
        },
        "the test",
    )


def a_task(recipe: Recipe, number: int, environment: str, image: str = "") -> TaskSubmitted:
    made = TaskMaker(recipe, "team").make(Item("item"), f"t{number}")
    use = EnvironmentUse(use=environment, image=image)
    return made.model_copy(update={"environment": use, "tenant": f"{environment}{image}"})


def started(core: SchedulerCore) -> list[int]:
    """Starts all that may start."""
    numbers = []
    while (chosen := core.choose(0.0)) is not None:
        assert chosen.verdict is None
        numbers.append(chosen.number)
    return numbers


def test_an_environment_and_an_image_have_so_many_live_episodes() -> None:
    recipe = a_recipe(environments={"shell": 3}, images={"a": 2})
    core = SchedulerCore(recipe)
    core.on_policy("default", 0)
    tasks = ["shell", "shell", "shell", "other", "other"]
    for number, environment in enumerate(tasks):
        core.on_task(number, a_task(recipe, number, environment))
    assert sorted(started(core)) == [0, 1, 3, 4]  # the image of the recipe's options is full
    core.on_outcome(0, 0)
    assert started(core) == [2]
    core.environments.on_set(LimitSet(limit="scheduler.images.a", set_at=1, units=0))
    core.on_task(5, a_task(recipe, 5, "shell"))
    core.on_outcome(1, 0)
    core.on_outcome(2, 0)
    assert started(core) == []
    core.environments.on_set(LimitSet(limit="scheduler.images.a", set_at=2, units=9))
    assert started(core) == [5]


def test_a_task_with_more_samples_than_the_limit_starts_alone() -> None:
    recipe = a_recipe(samples=4, environments={"shell": 2})
    core = SchedulerCore(recipe)
    core.on_policy("default", 0)
    for number in range(2):
        core.on_task(number, a_task(recipe, number, "shell"))
    assert started(core) == [0]
    for sample in range(3):
        core.on_outcome(0, sample)
    assert started(core) == []
    core.on_outcome(0, 3)
    assert started(core) == [1]


def test_small_tasks_do_not_overtake_a_large_one_for_ever() -> None:
    recipe = a_recipe(environments={"shell": 4})
    core = SchedulerCore(recipe)
    core.on_policy("default", 0)
    for number, samples in enumerate((1, 1, 1, 1, 4, *(1,) * 40)):
        task = a_task(recipe, number, "shell").model_copy(update={"samples": samples})
        core.on_task(number, task.model_copy(update={"tenant": f"of {samples}"}))
    live = started(core)
    for _ in range(4):  # each that ends would make room for another small one
        if 4 not in live:
            core.on_outcome(live.pop(0), 0)
            live += started(core)
    assert live == [4]


def test_a_successor_counts_what_its_predecessor_started() -> None:
    recipe = a_recipe(environments={"shell": 1})
    first, second = SchedulerCore(recipe), SchedulerCore(recipe)
    task = a_task(recipe, 0, "shell")
    for core in (first, second):
        core.on_policy("default", 0)
    first.on_task(0, task)
    chosen = first.choose(0.0)
    assert chosen is not None
    for event in first.starts(chosen, task, 0.0):
        second.on_started(event)
    second.on_task(1, a_task(recipe, 1, "shell"))
    assert started(second) == []
    second.on_outcome(0, 0)
    assert started(second) == [1]


def test_a_limit_of_an_unknown_environment_is_refused() -> None:
    with pytest.raises(RecipeError, match="no 'shel' among"):
        a_recipe(environments={"shel": 1})


def test_a_task_keeps_its_place_while_its_policy_is_busy() -> None:
    room = EnvironmentRoom(a_recipe(environments={"shell": 8}), Tenants({}))
    big = WaitingTask("train", "big", 8, frozenset({"default"}), "shell")
    small = WaitingTask("train", "small", 1, frozenset({"other"}), "shell")
    room.count(small, 7)
    assert not room.has_room(big, waits=True)
    room.count(small, -1)
    assert not room.has_room(small, waits=True), "the large task came first"
    assert room.has_room(small, waits=True, able=lambda task: task != big)
    assert not room.has_room(small, waits=True), "it has kept its place"
