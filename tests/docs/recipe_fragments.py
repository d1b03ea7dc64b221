"""Checks the parts of recipes that pages show: their keys, and the options of built-ins."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import PlugIn
from headrace.schemas.recipe.task_settings import Tasks
from headrace.services.agent.agents import BUILTIN as AGENTS
from headrace.services.base.plugins import load
from headrace.services.env.libraries.libraries_child import LIBRARIES
from headrace.services.env.libraries.libraries_setup import Bounds
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.env.service import BUILTIN, DOCKER
from headrace.services.namespace.cluster_config import RECIPES
from headrace.services.tasks.data_sets import BUILTIN as DATA_SETS

QUICKSTART = "quickstart"
ENVIRONMENTS = {**BUILTIN, **LIBRARIES, DOCKER: SandboxSettings}


def problems_of_fragment(text: str, over: str | None, modules: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with a part of a recipe.

    It is laid over the shipped recipe `over`. `modules` maps the names of modules that the page
    writes to their text: a plug-in that the part names in one of them must be in it.
    """
    try:
        fragment = tomllib.loads(text)
        base = tomllib.loads((RECIPES / f"{over or QUICKSTART}.toml").read_text())
        recipe = parse_recipe(laid_over(base, fragment), "the block")
    except (OSError, ValueError) as error:
        return [str(error)]
    return [*_wrong_options(recipe), *_missing(fragment, modules)]


def laid_over(base: Mapping[str, Any], fragment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the base with the keys of the fragment.

    `options` are not mixed: they belong to the plug-in that the fragment names.
    """
    merged = dict(base)
    if "use" in fragment:
        merged.pop("options", None)
    for key, value in fragment.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping) and key != "options":
            merged[key] = laid_over(below, value)
        else:
            merged[key] = value
    return merged


def _wrong_options(recipe: Recipe) -> Iterator[str]:
    """Yields the options that a built-in does not have."""
    plug_ins: list[tuple[str, Tasks | PlugIn, Mapping[str, Any]]]
    plug_ins = [("tasks", recipe.tasks, DATA_SETS)]
    plug_ins += [(f"agents.{name}", agent, AGENTS) for name, agent in recipe.agents.items()]
    plug_ins += [
        (f"environments.{name}", environment, ENVIRONMENTS)
        for name, environment in recipe.environments.items()
    ]
    for path, settings, built_in in plug_ins:
        if settings.use not in built_in:
            continue
        target = load(path, settings.use, built_in)
        if not inspect.isclass(target) and built_in is not DATA_SETS:
            continue
        bounds = Bounds.model_fields if settings.use in LIBRARIES else {}
        options = {key: value for key, value in settings.options.items() if key not in bounds}
        try:
            inspect.signature(target).bind_partial(**options)
        except TypeError as error:
            yield f"{path}.options: {error}"


def _missing(fragment: Mapping[str, Any], modules: Mapping[str, str]) -> Iterator[str]:
    """Yields the plug-ins that the page's modules do not have."""
    for value in fragment.values():
        if isinstance(value, Mapping):
            yield from _missing(value, modules)
            continue
        module, colon, name = str(value).partition(":")
        if colon and module in modules and name not in names_in(modules[module]):
            yield f"{value}: the page's {module}.py has no {name}"


def names_in(module: str) -> set[str]:
    """Returns the names that a module's text binds at its top level."""
    found: set[str] = set()
    for node in ast.parse(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found
