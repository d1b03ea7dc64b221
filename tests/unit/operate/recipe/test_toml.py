from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import change_recipe, load_recipe, parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import Settings
from headrace.services.namespace.cluster_config import RECIPES
from headrace.services.operate.recipe.recipe_keys import table_of
from headrace.services.operate.recipe.toml import recipe_toml, to_toml

ROOT = Path(__file__).parents[4]
SHIPPED = sorted((*RECIPES.glob("*.toml"), *ROOT.glob("examples/*/*.toml")))
EACH = pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    # A surrogate is no character, so no file can hold it.
    st.text(st.characters(exclude_categories=["Cs"])),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
TREES = st.recursive(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=4),
    lambda inner: st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.one_of(VALUES, inner), max_size=4
    ),
    max_leaves=10,
)


def reads(text: str) -> Recipe:
    return parse_recipe(tomllib.loads(text), "the test")


def loads(path: Path) -> Recipe:
    return load_recipe(str(path), shipped=RECIPES)


@given(TREES)
def test_tomllib_reads_back_what_is_written(tree: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(tree)) == tree


def test_tables_within_lists() -> None:
    tree = {"a": [{"b": 1, "c d": "x"}]}
    assert tomllib.loads(to_toml(tree)) == tree


@EACH
def test_a_printed_recipe_is_the_recipe(path: Path) -> None:
    recipe = loads(path)
    printed = reads(recipe_toml(recipe))
    assert printed == recipe
    assert printed.digest == recipe.digest
    assert recipe_toml(printed) == recipe_toml(recipe)


@EACH
def test_what_the_file_sets_is_set_and_nothing_else(path: Path) -> None:
    printed = tomllib.loads(recipe_toml(loads(path)))
    assert leaves(printed) == leaves(tomllib.loads(path.read_text()))


def leaves(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """All values by dotted key. The tables that are there without keys have none."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inside = f"{above}{name}"
        found |= leaves(value, f"{inside}.") if isinstance(value, dict) else {inside: value}
    return found


@EACH
def test_a_default_that_is_no_longer_a_comment_changes_nothing(path: Path) -> None:
    recipe = loads(path)
    lines, absent, defaults = [], False, 0
    for line in recipe_toml(recipe).splitlines():
        if line.startswith(("[", "# [")):
            absent = line.startswith("# [")
        key, _, value = line.removeprefix("# ").partition(" = ")
        default = line.startswith("# ") and re.fullmatch(r"\w+", key) and " #" not in value
        if default and not absent:
            defaults += 1
            line = line.removeprefix("# ")
        lines.append(line)
    assert defaults > 20
    assert reads("\n".join(lines)).digest == recipe.digest


@EACH
def test_an_absent_table_can_be_uncommented(path: Path) -> None:
    recipe = loads(path)
    name = next(iter(recipe.policies))
    if recipe.policies[name].lora is not None:
        pytest.skip("its table `lora` is there")
    header = f"# [policies.{name}.lora]"
    text = recipe_toml(recipe)
    assert header in text
    uncommented = reads(text.replace(header, header[2:]).replace("# rank = 16", "rank = 16", 1))
    lora = uncommented.policies[name].lora
    assert lora is not None
    assert lora.model_fields_set == {"rank"}


def test_every_key_is_there() -> None:
    table, found = "", set()
    for line in recipe_toml(loads(RECIPES / "quickstart.toml")).splitlines():
        if header := re.match(r"(?:# )?\[([\w.]+)\]", line):
            table = f"{header[1]}."
            found.add(header[1])
        elif key := re.match(r"(?:# )?(\w+) =", line):
            found.add(f"{table}{key[1]}")
    assert names(Recipe, "") - found == set()


def names(kind: type[Settings], path: str) -> set[str]:
    """The dotted names of all keys, in recipes that name each table `default`."""
    found: set[str] = set()
    for name, field in kind.model_fields.items():
        below = table_of(field.annotation)
        if below is None:
            found.add(f"{path}{name}")
        else:
            found |= names(below.kind, f"{path}{name}.{'default.' if below.many else ''}")
    return found


def test_what_is_switched_off_is_false() -> None:
    tree = {
        "name": "off",
        "tasks": {"environment": False},
        "policies": {"default": {"model": "tiny-llama", "training": False}},
    }
    recipe = parse_recipe(tree, "the test")
    printed = tomllib.loads(recipe_toml(recipe))
    assert printed["tasks"]["environment"] is False
    assert printed["policies"]["default"]["training"] is False
    assert reads(recipe_toml(recipe)).digest == recipe.digest


def test_a_null_in_options_is_refused() -> None:
    recipe = change_recipe(loads(RECIPES / "null.toml"), ["tasks.options.items=null"])
    with pytest.raises(UsageError, match=r"tasks\.options\.items is null.* --json"):
        recipe_toml(recipe)


def test_plug_ins_with_options_are_read_back() -> None:
    settings = [
        'policies.default.training.loss={ use = "gspo", clip_low = 0.1 }',
        'policies.default.groups.advantage={ use = "turn_returns", discount = 1.0 }',
        'policies.default.groups.filters=["zero_advantage", { use = "mine:Easy", most = 0.9 }]',
    ]
    recipe = change_recipe(load_recipe("quickstart", shipped=RECIPES), settings)
    written = recipe_toml(recipe)
    assert parse_recipe(tomllib.loads(written), "written") == recipe
    assert "clip_low = 0.1" in written
