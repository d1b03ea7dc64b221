"""Writes recipes as TOML. The standard library only reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import Settings
from headrace.services.operate.recipe.recipe_keys import (
    REQUIRED,
    InnerTable,
    Key,
    keys_of,
    table_of,
)

HEADER = """\
# Every key of the recipe. A key behind "# " is not set: its line shows its default, or its type if
# it is absent by default. To set it, remove the "# " and give a value. docs/recipe.md has the
# meanings.
"""
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def recipe_toml(recipe: Recipe) -> str:
    """Returns a recipe as TOML with every key: those that are not set are comments.

    `load_recipe` reads an equal recipe from it. Raises UsageError if an option is null.
    """
    return HEADER + "".join(_table(Recipe, recipe, ""))


def to_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Returns JSON values as TOML that `tomllib` reads back.

    Raises UsageError if a value is None, which TOML can't hold.
    """
    own, tables = [], []
    for name, value in tree.items():
        path = f"{prefix}{_key(name)}"
        if isinstance(value, Mapping):
            body = to_toml(value, f"{path}.")
            # A table that contains only tables needs no header line.
            only_tables = value and all(isinstance(child, Mapping) for child in value.values())
            tables.append(body if only_tables else f"\n[{path}]\n{body}")
        else:
            own.append(f"{_key(name)} = {toml_value(value, path)}\n")
    return "".join(own + tables)


def toml_value(value: Any, path: str = "a value") -> str:
    """Returns a JSON value as TOML, in one line. Raises UsageError with `path` if it has a None."""
    if value is None:
        raise UsageError(f"{path} is null, which TOML can't hold: use --json")
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item, path) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(name)} = {toml_value(item, path)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    # Strings, numbers and booleans are the same in TOML and JSON, except that TOML escapes DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _table(kind: type[Settings], table: Settings | None, path: str) -> Iterator[str]:
    """Yields the keys of a table, then the tables in it. `table` is None if it is absent."""
    inner: list[Iterable[str]] = []
    for key in keys_of(kind):
        value = key.default if table is None else getattr(table, key.name)
        below = table_of(kind.model_fields[key.name].annotation)
        inside = f"{path}{_key(key.name)}"
        is_set = table is not None and key.name in table.model_fields_set
        if below is not None and (value is not None or key.default is None):
            inner.append(_tables(below, value, inside))
        elif is_set and isinstance(value, dict) and value:
            inner.append([to_toml({key.name: value}, path)])
        elif is_set and (value is not None or key.default is not None):
            yield f"{_key(key.name)} = {toml_value(False if value is None else value, inside)}\n"
        else:
            yield f"# {_unset(key)}\n"
    for lines in inner:
        yield from lines


def _tables(below: InnerTable, value: Any, path: str) -> Iterator[str]:
    """Yields the table of a key, or its tables by name."""
    if below.many:
        if not value:
            yield f"\n[{path}]\n"  # Without it, there would be the tables of the default.
            yield f"\n# [{path}.default]  # absent by default\n"
            yield from _table(below.kind, None, f"{path}.default.")
        for name, one in value.items():
            yield from _tables(InnerTable(below.kind), one, f"{path}.{_key(name)}")
    elif value is None:
        yield f"\n# [{path}]  # absent by default\n"
        # No key of an absent table is set, so all its lines are comments.
        yield from _table(below.kind, None, f"{path}.")
    else:
        yield f"\n[{path}]\n"
        yield from _table(below.kind, value, f"{path}.")


def _unset(key: Key) -> str:
    if key.default is REQUIRED:
        return f"{key.name} =  # {key.kind}, required"
    if key.default is None:
        return f"{key.name} =  # {key.kind}, absent by default"
    return f"{key.name} = {toml_value(key.default, key.name)}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else toml_value(name, name)
