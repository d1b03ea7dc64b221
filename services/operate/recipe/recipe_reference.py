"""Writes `docs/recipe.md`: every key of a recipe, and the options of every built-in plug-in.

This is a tool: no process imports it. It needs every extra except vLLM's, because it imports the
built-ins. Run it in a checkout:

    python -m headrace.services.operate.recipe.recipe_reference --write
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.schemas.attribute_docs import attribute_docs
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.resources.engine_settings import ENGINE_OPTIONS
from headrace.schemas.recipe.tables import Settings
from headrace.services.agent import agents
from headrace.services.agent.gateway.container import ContainerSettings
from headrace.services.base.plugins import load
from headrace.services.env import gymnasium_environment as gymnasium
from headrace.services.env import service as environments
from headrace.services.env.libraries.libraries_child import LIBRARIES
from headrace.services.env.libraries.libraries_setup import Bounds
from headrace.services.env.sandbox.pool import TOOLS
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.operate.recipe.recipe_keys import REQUIRED, Key, about, keys_of, table_of
from headrace.services.operate.recipe.toml import toml_value
from headrace.services.tasks.curation.curators import CURATORS
from headrace.services.tasks.data_sets import BUILTIN as DATA_SETS
from headrace.services.tasks.task_maker import Item
from headrace.stream_jobs.filters import FILTERS
from headrace.stream_jobs.load_advantage import ADVANTAGES
from headrace.stream_jobs.selection import SELECTIONS
from headrace.trainer.losses.load_loss import LOSSES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "recipe.md"
INTRODUCTION = """\
<!-- Made from the code by `make reference`. To change a text, change the docstring. -->

# The recipe

A recipe is a TOML file that describes a run. This page has every key, and the options of every
built-in plug-in. Unknown keys are refused.

- **Start from a recipe that ships.** `headrace recipe` lists them.
  `headrace recipe quickstart > my.toml` writes one with every key. A key that the recipe doesn't
  set is a comment with its default.
- **Override keys without changing the file**, by `--set tasks.samples=16`, or by the environment
  variable `HEADRACE__TASKS__SAMPLES=16`. `--set` overrides the variable too. A value is JSON, or an
  array or table as TOML writes them. Anything else is text.
- **Let your editor check it.** `headrace recipe --schema > recipe.schema.json` writes a JSON
  schema. Make `#:schema ./recipe.schema.json` the first line of `my.toml`. Editors that use Taplo,
  such as VS Code with the extension Even Better TOML, then complete keys, show what they mean, and
  mark mistakes. The schema doesn't know the options of plug-ins.

`NAME` is a name of your choice. You must set a key whose default is (required). A key that is
absent by default has no value until you set it. A number may have a fraction, and a value is
anything that TOML can hold. An import path is `package.module:name`, of an installed package or of
a file in the folder in which you start Headrace: [extending.md](extending.md) says how to write a
plug-in.
"""


def reference() -> str:
    """Returns the page as Markdown. Raises UndocumentedOption if an option has no meaning."""
    parts = (_recipe, _data_sets, _agents, _environments, _engines, _choices)
    lines = [INTRODUCTION, *(line for part in parts for line in part())]
    return "\n".join(lines).rstrip() + "\n"


def _recipe() -> Iterator[str]:
    yield "## Top level\n"
    yield from _settings(Recipe, "")


def _settings(kind: type[Settings], path: str) -> Iterator[str]:
    """Yields the keys of a table, then the tables in it."""
    keys = {key.name: key for key in keys_of(kind)}
    tables = {
        name: table
        for name in keys
        if (table := table_of(kind.model_fields[name].annotation)) is not None
    }
    yield from _table([key for name, key in keys.items() if name not in tables], path)
    for name, table in tables.items():
        inside = f"{path}{name}.NAME" if table.many else f"{path}{name}"
        yield f"## `[{inside}]`\n"
        yield f"{about(table.kind)}\n"
        if keys[name].meaning != about(table.kind):
            absent = "By default the table is absent. " if keys[name].default is None else ""
            yield f"{absent}{keys[name].meaning}\n"
        yield from _settings(table.kind, f"{inside}.")


def _data_sets() -> Iterator[str]:
    yield "## Data sets\n"
    yield "The values of `tasks.use`, `warm_start.use` and `evaluation.use`.\n"
    yield f"{about(Item)}\n"
    yield from (f"- `{name}`: {meaning}" for name, meaning in attribute_docs(Item).items())
    yield ""
    yield from _each("Data set", DATA_SETS)


def _agents() -> Iterator[str]:
    yield "## Agents\n"
    yield "The values of `agents.NAME.use`.\n"
    yield "[gateway.md](gateway.md) explains `command` and `client`.\n"
    for name, use in agents.BUILTIN.items():
        agent = load("agent", name, {name: use})
        options = agent if inspect.isclass(agent) else agents.OPTIONS.get(name)
        yield from _plug_in("Agent", name, agent, keys_of(options) if options else [])
    yield from _plug_in("Option", "container", ContainerSettings, keys_of(ContainerSettings))


def _environments() -> Iterator[str]:
    yield "## Environments\n"
    yield (
        "The values of `environments.NAME.use`. [environments.md](environments.md) explains them,"
        " and [sandboxes.md](sandboxes.md) explains `docker`.\n"
    )
    plain = {name: use for name, use in environments.BUILTIN.items() if name != environments.DOCKER}
    yield from _each("Environment", plain)
    for key, functions in (("render", gymnasium.RENDERS), ("seeded", gymnasium.SEEDED)):
        yield f"### Values of `{key}` of the environment `gymnasium`\n"
        yield from _functions(functions)
    yield from _each("Environment", LIBRARIES)
    yield f"### Further options of {' and '.join(f'`{name}`' for name in LIBRARIES)}\n"
    yield from _table(keys_of(Bounds))
    docker = environments.DOCKER
    yield from _plug_in("Environment", docker, SandboxSettings, keys_of(SandboxSettings))
    yield f"### Values of `tool` of the environment `{docker}`\n"
    yield "`tool_options` has the options of the tool.\n"
    yield from _each("Tool", TOOLS, given=2)  # its sandbox and its task are not options


def _engines() -> Iterator[str]:
    yield "## Engines\n"
    yield "The values of `policies.NAME.engine.use`. [engines.md](engines.md) explains them.\n"
    for name, options in ENGINE_OPTIONS.items():
        yield from _plug_in("Engine", name, options, keys_of(options))


def _choices() -> Iterator[str]:
    for title, key, functions in (
        ("Curators", "tasks.curators", CURATORS),
        ("Advantages", "policies.NAME.groups.advantage", ADVANTAGES),
        ("Filters", "policies.NAME.groups.filters", FILTERS),
        ("Selections", "policies.NAME.groups.select", SELECTIONS),
        ("Losses", "policies.NAME.training.loss", LOSSES),
    ):
        yield f"## {title}\n"
        yield f"The values of `{key}`, or of `use` in a table with options.\n"
        for name in functions:
            plug_in = load(title, name, functions)
            options = keys_of(plug_in) if inspect.isclass(plug_in) else []
            yield from _plug_in(title[: -2 if title == "Losses" else -1], name, plug_in, options)


def _each(kind: str, builtins: Mapping[str, Any], given: int = 0) -> Iterator[str]:
    for name, use in builtins.items():
        plug_in = load(kind, name, {name: use})
        yield from _plug_in(kind, name, plug_in, keys_of(plug_in, given))


def _plug_in(kind: str, name: str, plug_in: Any, options: list[Key]) -> Iterator[str]:
    yield f"### {kind} `{name}`\n"
    yield f"{about(plug_in)}\n"
    if fixed := sorted(getattr(plug_in, "recipe_only", ())):
        yield f"A task can't override {', '.join(f'`{option}`' for option in fixed)}.\n"
    yield from _table(options)


def _functions(functions: Mapping[str, str]) -> Iterator[str]:
    for name in functions:
        yield f"**`{name}`**\n"
        yield f"{about(load('function', name, functions))}\n"


def _table(keys: list[Key], path: str = "") -> Iterator[str]:
    if not keys:
        yield "It has no options.\n"
        return
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        cells = (f"`{path}{key.name}`", key.kind, _default(key), key.meaning)
        escaped = [cell.replace("|", "\\|") for cell in cells]
        yield f"| {' | '.join(escaped)} |"
    yield ""


def _default(key: Key) -> str:
    if key.default is REQUIRED:
        return "(required)"
    if key.default is None:
        return "absent"
    return f"`{toml_value(key.default)}`"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/recipe.md of a checkout")
    if parser.parse_args().write:
        PAGE.write_text(reference())
        print(PAGE)
    else:
        sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
