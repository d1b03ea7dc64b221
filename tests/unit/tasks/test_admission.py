"""Which tasks a recipe can't run, whoever submits them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.schemas.events import Blob, EnvironmentUse, Sampling, TaskSubmitted, Use
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.tasks.admission import (
    MAX_ID_BYTES,
    MAX_MESSAGE,
    MAX_START_BYTES,
    own_labels,
    refusal,
    size_of,
)

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


SANDBOXES = Recipe.model_validate(
    {
        "name": "r",
        "artifacts": {"files": 2, "file_mb": 1, "task_mb": 1},
        "environments": {
            "default": {"use": "docker", "options": {"image": "a", "images": ["b"]}},
            "null": {},
            "theirs": {"use": "external"},
        },
        "policies": {"default": {"model": "tiny"}},
    }
)


def a_blob(name: str, size: int = 1) -> Blob:
    return Blob(sha256=bytes(32), size=size, name=name)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, ""),
        ({"environment": EnvironmentUse(use="default", image="b")}, ""),
        ({"environment": EnvironmentUse(use="default", image="c")}, "unknown_image"),
        ({"environment": EnvironmentUse(use="null", image="a")}, "unknown_image"),
        ({"environment": EnvironmentUse(use="theirs", image="any")}, ""),
        ({"environment": EnvironmentUse(use="default", collect=("out/*",))}, ""),
        ({"environment": EnvironmentUse(use="default", collect=("/etc/*",))}, "bad_artifacts"),
        ({"environment": EnvironmentUse(use="default", collect=("a",) * 65)}, "bad_artifacts"),
        ({"artifacts": (a_blob("a"), a_blob("b/c"))}, ""),
        ({"artifacts": (a_blob("../a"),)}, "bad_artifacts"),
        ({"artifacts": (a_blob("a"), a_blob("a"))}, "bad_artifacts"),
        ({"artifacts": (a_blob(""),)}, "bad_artifacts"),
        ({"artifacts": tuple(map(a_blob, "abc"))}, "bad_artifacts"),
        ({"artifacts": (a_blob("a", 1 << 21),)}, "bad_artifacts"),
        ({"artifacts": (a_blob("a", 1 << 19), a_blob("b", 1 << 20))}, "bad_artifacts"),
        ({"artifacts": (a_blob("a"),), "environment": None}, "bad_artifacts"),
        ({"labels": {"a": "b", "curation.state": "x" * 10_000}}, ""),
        ({"labels": {"a": "x" * 257}}, "bad_task"),
        ({"labels": {"": "x"}}, "bad_task"),
        ({"labels": {str(n): "" for n in range(65)}}, "bad_task"),
        ({"item_id": "x" * MAX_ID_BYTES}, ""),
        ({"item_id": "\u20ac" * (MAX_ID_BYTES // 3 + 1)}, "bad_task"),
        ({"task_id": "x" * (MAX_ID_BYTES + 1)}, "bad_task"),
        ({"source": "x" * (MAX_ID_BYTES + 1)}, "bad_task"),
    ],
)
def test_what_any_program_may_write_is_checked(changes: dict[str, Any], code: str) -> None:
    failure = refusal(SANDBOXES, a_task("policy").model_copy(update=changes))
    assert (failure.code if failure is not None else "") == code
    assert failure is None or (failure.origin, failure.retryable) == ("operator", False)


def test_labels_of_the_task_source_are_not_the_submitter_s() -> None:
    labels = {"a": "b", "curation.state": "{}", "league.default": "3"}
    assert own_labels(a_task("policy", labels=labels)) == {"a": "b"}


def test_a_verdict_does_not_repeat_a_name_of_any_length() -> None:
    why = refusal(RECIPE, a_task("policy").model_copy(update={"agent": "x" * 500_000}))
    assert why is not None
    assert why.code == "unknown_agent"
    assert len(why.message) == MAX_MESSAGE


@pytest.mark.parametrize("letter", ["x", "\u20ac"], ids=["one byte", "three bytes"])
def test_a_task_that_is_too_large_with_all_its_samples_is_refused(letter: str) -> None:
    task = a_task("policy", payload=json.dumps({"text": letter * 300_000}, ensure_ascii=False))
    most = MAX_START_BYTES // size_of(task)
    assert (letter == "x") == (most > 200)
    assert refusal(RECIPE, task.model_copy(update={"samples": most - 1})) is None
    why = refusal(RECIPE, task.model_copy(update={"samples": most + 1}))
    assert why is not None
    assert why.code == "too_large"
    assert f"the {most + 1} samples" in why.message


def test_more_samples_than_a_task_may_have_are_refused_as_such() -> None:
    why = refusal(RECIPE, a_task("policy").model_copy(update={"samples": 2_000_000_000}))
    assert why is not None
    assert why.code == "bad_task"
