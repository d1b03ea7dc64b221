"""What is demonstrated, and when it is learned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import BatchAssembled, PolicyPublished, Run
from headrace.schemas.frontier import Frontier
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.services.tasks.warm_start import Learned, demonstrating, demonstrations


def a_recipe(**warm_start: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "a-run",
            "agents": {"default": {}, "teacher": {"use": "single_turn"}},
            "tasks": {"options": {"items": 3}, "samples": 8, "minimum": 4},
            "warm_start": warm_start,
            "policies": {"default": {"model": "tiny-llama"}},
        },
        "here",
    )


def shown(recipe: Recipe) -> list[tuple[str, int, str]]:
    assert recipe.warm_start is not None
    found = demonstrations(recipe, recipe.warm_start)
    return [(task_id, epoch, item.item_id) for task_id, epoch, item in found]


def test_a_small_data_set_is_demonstrated_epoch_by_epoch() -> None:
    assert shown(a_recipe(tasks=5)) == [
        ("warm-start-0-0", 0, "0"),
        ("warm-start-0-1", 0, "1"),
        ("warm-start-0-2", 0, "2"),
        ("warm-start-1-0", 1, "0"),
        ("warm-start-1-1", 1, "1"),
    ]


def test_demonstrations_may_come_of_another_data_set() -> None:
    recipe = a_recipe(tasks=2, use="count", options={"items": 1, "same": True})
    assert shown(recipe) == [("warm-start-0-0", 0, "0"), ("warm-start-1-0", 1, "0")]
    assert shown(a_recipe(use="count", options={"items": 0})) == []


def test_the_teacher_replaces_the_agent() -> None:
    recipe = a_recipe(samples=2)
    assert recipe.warm_start is not None
    tasks = demonstrating(recipe, recipe.warm_start).tasks
    assert (tasks.agent, tasks.samples, tasks.minimum) == ("teacher", 2, 1)
    assert recipe.tasks.agent == "default"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warm_start": {"agent": "nobody"}}, "no agent 'nobody'"),
        ({"warm_start": {}, "tasks": {"purpose": "evaluate"}}, "trains nothing"),
        ({"warm_start": {"tasks": 0}}, "warm_start.tasks"),
    ],
)
def test_a_recipe_that_can_not_be_is_refused(change: dict[str, Any], reason: str) -> None:
    tree = a_recipe().model_dump(mode="json") | change
    with pytest.raises(RecipeError, match=reason):
        parse_recipe(tree, "here")


def a_batch(version: int, decided: set[int], policy: str = "default") -> BatchAssembled:
    frontier = Frontier()
    for task in decided:
        frontier.add(task)
    return BatchAssembled(
        policy=policy,
        version=version,
        recipe=bytes(32),
        seed=0,
        samples=(),
        sampled_tokens=0,
        low_mark=frontier.low_mark,
        decided=tuple(Run(first=first, last=last) for first, last in frontier.runs),
        groups_read=0,
    )


def a_publication(version: int, policy: str = "default") -> PolicyPublished:
    return PolicyPublished(
        policy=policy, version=version, status="trained", digest=bytes(32), full_version=version
    )


def test_they_are_learned_once_the_batch_that_decides_the_last_is_published() -> None:
    learned = Learned(["default"], [0, 1, 5])
    learned.on_batch(a_batch(1, {0, 1, 2}))
    learned.on_policy(a_publication(1))
    assert not learned.done
    learned.on_batch(a_batch(2, {0, 1, 2, 5}))
    assert not learned.done
    learned.on_policy(a_publication(2, "another"))
    assert not learned.done
    learned.on_policy(a_publication(2))
    assert learned.done


def test_every_policy_has_to_learn_them() -> None:
    learned = Learned(["one", "other"], [0])
    for policy in ("one", "other"):
        assert not learned.done
        learned.on_policy(a_publication(1, policy))
        learned.on_batch(a_batch(1, {0}, policy))
    assert learned.done


@given(
    st.sets(st.integers(0, 12), min_size=1),
    st.lists(st.sets(st.integers(0, 12)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_order_in_which_batches_and_publications_come_does_not_matter(
    tasks: set[int], steps: list[set[int]], chance: Any
) -> None:
    """Topics are read side by side: only the order within each is kept."""
    decided: set[int] = set()
    batches: list[BatchAssembled | PolicyPublished] = []
    for version, step in enumerate([*steps, tasks], 1):
        decided |= step
        batches.append(a_batch(version, decided))
    published: list[BatchAssembled | PolicyPublished] = [
        a_publication(version) for version in range(len(batches) + 1)
    ]
    learned = Learned(["default"], tasks)
    while batches or published:
        event = (
            published if not batches or (published and chance.random() < 0.5) else batches
        ).pop(0)
        if isinstance(event, BatchAssembled):
            learned.on_batch(event)
        else:
            learned.on_policy(event)
    assert learned.done
