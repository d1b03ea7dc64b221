"""Reads a recipe from a TOML file.

Environment variables (`HEADRACE__SCHEDULER__LIVE_EPISODES=64`) override the file, and `--set`
(`--set scheduler.live_episodes=64`) overrides both.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headrace.schemas.problems import problems_of
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError

ENVIRONMENT_PREFIX = "HEADRACE__"


def load_recipe(
    name_or_path: str,
    *,
    shipped: Path,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """Reads a recipe by its path, or by its name in the folder `shipped`.

    `environment` overrides keys as `HEADRACE__A__B`, and `settings` as `a.b=value`. A value is
    JSON, or an array or table as TOML writes them. Anything else is text. Raises RecipeError, which
    names everything that is wrong.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = shipped / f"{name_or_path}.toml"
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
        raise RecipeError(
            f"no recipe {name_or_path!r}: give the path of a .toml file, or one of: {names}"
            if path.parent == shipped
            else f"there is no file {path.absolute()}; the shipped recipes are: {names}"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    sources = {}
    for key, value in sorted((environment or {}).items()):
        if key.startswith(ENVIRONMENT_PREFIX):
            keys = key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _override(tree, keys, value, source=key)
            sources[".".join(keys)] = key
    _override_all(tree, settings)
    sources |= {setting.partition("=")[0]: "--set" for setting in settings}
    return parse_recipe(tree, str(path), sources)


def change_recipe(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Returns the recipe with keys overridden as `a.b=value`. Raises RecipeError."""
    tree = recipe.model_dump(mode="json")
    _override_all(tree, settings)
    return parse_recipe(tree, "--set")


def _override_all(tree: dict[str, Any], settings: Sequence[str]) -> None:
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(
                f"--set {setting}: give key=value, for example scheduler.live_episodes=64"
            )
        _override(tree, name.split("."), value, source=f"--set {name}")


def parse_recipe(
    tree: Mapping[str, Any], origin: str, sources: Mapping[str, str] | None = None
) -> Recipe:
    """Checks the tables of a recipe. Raises RecipeError, which names each wrong key.

    `origin` says where the recipe comes from; error messages begin with it. `sources` says it of
    keys that come from elsewhere.
    """
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        for problem in problems_of(error, "the recipe"):
            found.setdefault(_source(problem, sources or {}) or origin, []).append(problem)
        texts = (f"{source}: {'; '.join(problems)}" for source, problems in found.items())
        raise RecipeError("; ".join(texts)) from error


def _source(problem: str, sources: Mapping[str, str]) -> str | None:
    """Returns from where the key of a problem, or of a table in a problem's key, was overridden."""
    wrong = problem.partition(": ")[0]
    for key, source in sources.items():
        unknown = problem.endswith(": no such key") and f"{key}.".startswith(f"{wrong}.")
        if unknown or f"{wrong}.".startswith(f"{key}."):
            return source
    return None


def _override(tree: dict[str, Any], keys: list[str], text: str, *, source: str) -> None:
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise RecipeError(f"{source}: {key} is a value, not a table")
    node[keys[-1]] = value_of(text)


def value_of(text: str) -> Any:
    """Returns what a text means as JSON, or as an array or table of TOML; otherwise the text."""
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    if text.startswith(("{", "[")):
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"value = {text}")["value"]
    return text
