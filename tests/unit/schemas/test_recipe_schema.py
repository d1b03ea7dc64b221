"""The JSON schema of recipes accepts what `load_recipe` accepts, and refuses misspelt keys."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator, ValidationError  # type: ignore[import-untyped]

from headrace.schemas.recipe.recipe_schema import recipe_schema
from headrace.services.namespace.cluster_config import RECIPES

ROOT = Path(__file__).parents[3]
SMALLEST: dict[str, Any] = {"name": "small", "policies": {"default": {"model": "tiny-llama"}}}


def validate(tree: dict[str, Any]) -> None:
    """Taplo validates by draft 7 if a schema names no draft."""
    schema = recipe_schema()
    assert "$schema" not in schema
    Draft7Validator.check_schema(schema)
    Draft7Validator(schema).validate(tree)


@pytest.mark.parametrize(
    "path",
    sorted((*RECIPES.glob("*.toml"), *ROOT.glob("examples/*/*.toml"))),
    ids=lambda path: path.stem,
)
def test_shipped_recipes_are_valid(path: Path) -> None:
    validate(tomllib.loads(path.read_text()))


def test_what_is_switched_off_is_valid() -> None:
    validate(SMALLEST)
    off = {"model": "tiny-llama", "training": False}
    validate(SMALLEST | {"tasks": {"environment": False}, "policies": {"default": off}})


@pytest.mark.parametrize(
    ("more", "at"),
    [
        ({"tasks": {"epoch": 1}}, ["tasks"]),
        ({"tasks": {"samples": 0}}, ["tasks", "samples"]),
        (
            {"policies": {"default": {"model": "m", "dtype": "int8"}}},
            ["policies", "default", "dtype"],
        ),
        ({"workers": False}, ["workers"]),
    ],
)
def test_mistakes_are_refused(more: dict[str, Any], at: list[str]) -> None:
    with pytest.raises(ValidationError) as raised:
        validate(SMALLEST | more)
    assert list(raised.value.absolute_path) == at


def test_keys_have_meanings_and_toml_has_no_null() -> None:
    tables = recipe_schema()["$defs"]
    for table in tables.values():
        for name, key in table["properties"].items():
            assert key.get("description") or "$ref" in str(key), name
            assert "'type': 'null'" not in str(key), name
    assert tables["Tasks"]["properties"]["epochs"]["description"].startswith("Number of passes")
