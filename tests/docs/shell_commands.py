"""Finds the commands `headrace …` in shell text, and checks them against the real commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import click

from headrace.errors import UsageError
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.cli import cli

_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_DESCRIPTOR = re.compile(r"(?<=\s)\d(?=[<>])")
"""The 2 of `2> log`."""
_ASSIGNMENT = re.compile(r"\w+=")
_SEPARATORS = frozenset({"&", "&&", "|", "||", "|&", ";", ";;", "(", ")"})
_SEPARATING = frozenset("&|;()")


def headrace_commands(text: str) -> list[list[str]]:
    """Returns the arguments of each command `headrace` of a shell script, whatever its path is.

    Raises ValueError if a quotation has no end.
    """
    return [
        words[1:]
        for line in _logical_lines(text)
        for words in _simple_commands(line)
        if PurePath(words[0]).name == "headrace"
    ]


def problem_of(arguments: Sequence[str]) -> str | None:
    """Returns what is wrong with a command, or None.

    It checks that command and options exist, that values have the right type, and that a shipped
    recipe exists and has the keys that `--set` changes. It looks for no file.
    """
    try:
        context = cli.make_context("headrace", list(arguments))
        found = _resolved(context)
    except click.exceptions.Exit:
        return None  # `--help` or `--version`.
    except click.BadParameter as error:
        missing = isinstance(error, click.MissingParameter)
        of_file = error.param is not None and isinstance(error.param.type, click.Path | click.File)
        return None if of_file and not missing else error.format_message()
    except click.ClickException as error:
        return error.format_message()
    recipe = str(found.params.get("recipe") or "")
    if not recipe or recipe.endswith((".toml", ".json")):
        return None
    try:
        read_recipe(recipe, found.params.get("settings", ()))
    except UsageError as error:
        return str(error)
    return None


def _resolved(context: click.Context) -> click.Context:
    """Returns the context of the command in a group, and so on."""
    while isinstance(context.command, click.Group):
        group, rest = context.command, [*context._protected_args, *context.args]
        name, command, arguments = group.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, arguments, parent=context)
    return context


def _logical_lines(text: str) -> Iterator[str]:
    """Yields lines that are joined if a backslash or a quotation continues them.

    Leaves out the text of here documents.
    """
    lines = iter(text.splitlines())
    for first in lines:
        line = first
        while (more := _is_open(line)) and (following := next(lines, None)) is not None:
            line = f"{line[:-1]} {following}" if more == "\\" else f"{line}\n{following}"
        if _is_open(line):
            raise ValueError(f"a quotation has no end: {line}")
        yield line
        for _, end in _HERE_DOCUMENT.findall(line):
            while next(lines, end).strip() != end:
                pass


def _is_open(line: str) -> str:
    """Returns why the next line belongs to a line, or an empty text."""
    if line.endswith("\\"):
        return "\\"
    try:
        shlex.split(line, comments=True)
    except ValueError as error:
        return str(error)
    return ""


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yields the words of each command of a line, without assignments and redirections."""
    lexer = shlex.shlex(_DESCRIPTOR.sub("", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    tokens = list(lexer)
    for number, token in enumerate([*tokens, ";"]):
        if set(token) <= _SEPARATING and token in _SEPARATORS:
            if words:
                yield words
            words = []
        elif token.startswith((">", "<")) or (number and tokens[number - 1].startswith((">", "<"))):
            continue
        elif words or not _ASSIGNMENT.match(token):
            words.append(token)
