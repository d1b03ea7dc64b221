"""Checks of a page's blocks that execute nothing of them, but for their imports."""

from __future__ import annotations

import ast
import importlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence

from headrace.schemas.recipe.read_recipe import parse_recipe
from tests.docs.markdown import NEEDS, Block
from tests.docs.recipe_fragments import names_in, problems_of_fragment
from tests.docs.shell_commands import headrace_commands, problem_of

DOWN = "down"
"""The command that would end the stack that the pages share."""


def problems_of_page(blocks: Sequence[Block]) -> list[str]:
    """Returns what is wrong with a page's blocks: `line 7: …`."""
    modules = {
        block.file.removesuffix(".py"): block.text
        for block in blocks
        if block.file is not None and block.file.endswith(".py")
    }
    return [
        f"line {block.line}: {problem}" for block in blocks for problem in _problems(block, modules)
    ]


def _problems(block: Block, modules: Mapping[str, str]) -> Iterator[str]:
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "python": lambda: _python(block, modules),
        "sh": lambda: _shell(block),
        "toml": lambda: _toml(block, modules),
        "json": lambda: _json(block.text),
    }
    if block.language in checks:
        yield from checks[block.language]()


def _python(block: Block, modules: Mapping[str, str]) -> Iterator[str]:
    """Yields what can't be compiled or imported."""
    try:
        tree = compile(
            block.text, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
    except SyntaxError as error:
        yield str(error)
        return
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name not in modules:
                        importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                yield from _missing_names(str(node.module), node.names, modules)
        except ImportError as error:
            if block.reason not in NEEDS:
                yield str(error)


def _missing_names(
    module: str, names: Sequence[ast.alias], modules: Mapping[str, str]
) -> Iterator[str]:
    if module in modules:
        found = {alias.name for alias in names} & names_in(modules[module])
    else:
        imported = importlib.import_module(module)
        found = {alias.name for alias in names if hasattr(imported, alias.name)}
    for alias in names:
        if alias.name not in found:
            yield f"{module} has no {alias.name}"


def _shell(block: Block) -> Iterator[str]:
    """Yields the commands `headrace` that do not exist, or have other options."""
    try:
        commands = headrace_commands(block.text)
    except ValueError as error:
        yield str(error)
        return
    for command in commands:
        if (problem := problem_of(command)) is not None:
            yield f"headrace {' '.join(command)}: {problem}"
        if block.executed(long=True) and command[:1] == [DOWN]:
            yield "headrace down would end the stack that the pages share: write run=never"


def _toml(block: Block, modules: Mapping[str, str]) -> Iterator[str]:
    """Yields what a recipe, or a part of one, can't have."""
    if block.file is None:
        yield from problems_of_fragment(block.text, block.words.get("over"), modules)
        return
    try:
        tree = tomllib.loads(block.text)
        if "policies" in tree:
            parse_recipe(tree, block.file)
    except ValueError as error:
        yield str(error)


def _json(text: str) -> Iterator[str]:
    try:
        json.loads(text)
    except ValueError as error:
        yield str(error)
