"""A teacher must have the student's token ids, and read what the student may write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.inference.service import prepare
from headrace.services.models.weights import model_folder
from headrace.services.tasks.teachers import check_teachers

STUDENT = "tiny-llama"
CONTEXT = 512


class Deaf:
    """An engine without a method to score."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder(STUDENT), tmp_path / "copy"))


def recipe(teacher: Any, **policy: Any) -> Recipe:
    training = {"loss": "distill", "teacher": "big"}
    policies = {
        "default": {"model": STUDENT, "training": training},
        "big": {"model": str(teacher), "training": None, **policy},
    }
    return Recipe.model_validate({"name": "a", "policies": policies})


def changed(folder: Path, file: str, **changes: Any) -> Path:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def test_the_same_tokenizer_and_context_fit() -> None:
    check_teachers(recipe(STUDENT))


def test_a_file_that_only_looks_different_has_the_same_ids(copy: Path) -> None:
    check_teachers(recipe(changed(copy, "tokenizer.json", padding=None, extra="x")))


def test_other_token_ids_are_refused(copy: Path) -> None:
    tree = json.loads((copy / "tokenizer.json").read_text())
    added = [*tree["added_tokens"], {"id": 300, "content": "<more>"}]
    changed(copy, "tokenizer.json", added_tokens=added)
    with pytest.raises(UsageError, match=r"policies\.default\.training\.teacher: .* other token"):
        check_teachers(recipe(copy))


def test_a_shorter_context_is_refused(copy: Path) -> None:
    changed(copy, "config.json", max_position_embeddings=CONTEXT - 1)
    with pytest.raises(UsageError, match=r"scores 511 tokens, .* may have 512\. Set engine"):
        check_teachers(recipe(copy))
    options = {"engine": {"options": {"context": 100}}}
    with pytest.raises(UsageError, match="scores 100 tokens"):
        check_teachers(recipe(STUDENT, **options))
    with pytest.raises(UsageError, match="scores 511 tokens"):
        check_teachers(recipe(STUDENT, engine={"use": "vllm"}))


def test_an_engine_that_cannot_score_is_refused() -> None:
    with pytest.raises(UsageError, match=r"policies\.big\.engine: Deaf has no method `score`"):
        prepare(recipe(STUDENT, engine={"use": f"{__name__}:Deaf"}))
    prepare(recipe(STUDENT, engine={"use": "scripted"}))
