from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.submit.task_lines import read_tasks
from headrace.services.tasks.per_task import read_settings


@pytest.fixture
def recipe() -> Recipe:
    return read_recipe("null")


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobStore:
    return LocalBlobStore(tmp_path / "blobs", "cluster.run")


def test_a_line_is_filled_up_from_the_recipe(recipe: Recipe, blobs: LocalBlobStore) -> None:
    lines = ['{"item_id": "a", "payload": {"x": 1}, "samples": 3, "task_id": "t"}', "", "{}"]
    first, second = read_tasks(recipe, "me", lines, blobs)

    assert (first.source, first.task_id, first.item_id, first.samples) == ("me", "t", "a", 3)
    assert first.payload == '{"x": 1}'
    assert (second.samples, second.max_turns) == (recipe.tasks.samples, recipe.tasks.max_turns)


def test_ids_are_the_same_for_the_same_file(recipe: Recipe, blobs: LocalBlobStore) -> None:
    lines = ["{}", "{}"]
    ids = [task.task_id for task in read_tasks(recipe, "me", lines, blobs)]

    assert ids == [task.task_id for task in read_tasks(recipe, "me", lines, blobs)]
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
def test_a_bad_line_is_named(
    recipe: Recipe, blobs: LocalBlobStore, line: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_tasks(recipe, "me", ["{}", line], blobs)


FULL = """{"agent": "default", "options": {"a": 1}, "environment": "default", "mode": "persistent",
"environment_options": {"b": 2}, "collect": ["out/*"], "artifacts": {"in/x": "x.txt"},
"priority": 3, "tenant": "gold", "labels": {"exp": "7"}}""".replace("\n", " ")


def test_a_line_sets_all_that_a_task_has(
    recipe: Recipe, blobs: LocalBlobStore, tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("x")
    (task,) = read_tasks(recipe, "me", [FULL], blobs, folder=tmp_path)
    assert task.environment is not None
    assert (task.agent, task.options, task.tenant) == ("default", '{"a": 1}', "gold")
    assert (task.environment.use, task.environment.mode) == ("default", "persistent")
    assert (task.environment.options, task.environment.collect) == ('{"b": 2}', ("out/*",))
    assert (task.priority, task.labels) == (3, {"exp": "7"})
    assert [(one.name, one.size) for one in task.artifacts] == [("in/x", 1)]
    assert blobs.get(task.artifacts[0]).read_text() == "x"


def test_options_of_the_command_override_lines_and_lines_the_recipe(
    recipe: Recipe, blobs: LocalBlobStore
) -> None:
    tasks = recipe.tasks.model_copy(update={"tenant": "of recipe", "labels": {"r": "1", "x": "r"}})
    changed = recipe.model_copy(update={"tasks": tasks})
    lines = ["{}", '{"tenant": "of line", "labels": {"x": "l"}, "priority": 1}']
    bare, line = read_tasks(changed, "me", lines, blobs)
    assert (bare.tenant, bare.labels) == ("of recipe", {"r": "1", "x": "r"})
    assert (line.tenant, line.labels) == ("of line", {"r": "1", "x": "l"})
    over = read_settings({"tenant": "of flag", "labels": {"f": "1"}, "priority": -1}, "flags")
    for one in read_tasks(changed, "me", lines, blobs, overriding=over):
        assert (one.tenant, one.priority, one.labels["f"]) == ("of flag", -1, "1")


def test_an_environment_of_a_line_has_what_the_recipe_collects(
    recipe: Recipe, blobs: LocalBlobStore
) -> None:
    other = recipe.environments["default"].model_copy(update={"collect": ("a",)})
    changed = recipe.model_copy(update={"environments": {**recipe.environments, "other": other}})
    lines = ['{"environment": "other"}', "{}", '{"environment": false}']
    found = [task.environment for task in read_tasks(changed, "me", lines, blobs)]
    assert [one.collect if one is not None else None for one in found] == [("a",), (), None]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"agent": "nobody"}', "no agent 'nobody'"),
        ('{"environment": "nowhere"}', "no environment 'nowhere'"),
        ('{"image": "mine"}', "has no containers"),
        ('{"mode": "eternal"}', "mode: Input should be 'ephemeral' or 'persistent'"),
        ('{"environment": false, "image": "x"}', "no environment"),
        ('{"artifacts": {"a": "not there"}}', "artifacts.a: there is no file"),
        ('{"artifacts": {"../a": "/etc/hostname"}}', "relative path"),
        ('{"collect": ["../*"]}', "can't be a pattern"),
        ('{"labels": {"x": "' + "y" * 257 + '"}}', "label 'x'"),
        ('{"options": [1]}', "options: Input should be an object"),
    ],
)
def test_what_the_run_would_refuse_is_not_submitted(
    recipe: Recipe, blobs: LocalBlobStore, line: str, message: str
) -> None:
    with pytest.raises(UsageError, match=f"line 2: .*{message}.*Nothing was submitted"):
        read_tasks(recipe, "me", ["{}", line], blobs)
    assert list(blobs.stored()) == []
