"""What the commands of all kinds share: the name of the plug-in, its options, and the output."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import echo, json_option, print_json, together

if TYPE_CHECKING:
    from headrace.services.operate.conformance.conformance_report import ConformanceReport

conformance_options = together(
    click.argument("use", metavar="NAME_OR_MODULE:NAME"),
    click.option(
        "--option", "options", metavar="KEY=VALUE", multiple=True,
        help="An option of the plug-in, as in the recipe: JSON, or a text. Repeatable.",
    ),
    click.option(
        "--rule", "rules", metavar="NAME", multiple=True,
        help="Try this rule. Repeatable. [default: all]",
    ),
    json_option,
)  # fmt: skip
"""Adds the argument `use` and the options `options`, `rules` and `as_json`."""
payload_option = click.option(
    "--payload", metavar="JSON", default="{}", show_default=True,
    help="The payload of the task, as a JSON object.",
)  # fmt: skip
blocked_option = click.option(
    "--blocked", "blocked_s", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True),
    default=0.5, show_default=True, help="Most seconds for which a call may block the asyncio "
    "loop.",
)  # fmt: skip


def plug_in_options(given: tuple[str, ...]) -> dict[str, Any]:
    """Returns the options of `--option` by name. Raises UsageError if one has no value."""
    from headrace.errors import UsageError
    from headrace.schemas.recipe.read_recipe import value_of
    from headrace.services.base.reveal import reveal

    options: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name:
            raise UsageError(f"--option {one}: give KEY=VALUE, for example --option context=4096")
        options[name] = value_of(value)
    return dict(reveal(options, "--option"))


def json_object(option: str, text: str) -> dict[str, Any]:
    """Returns the JSON object of an option. Raises UsageError if it is none."""
    import json

    from headrace.errors import UsageError

    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{option} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{option} {text}: give a JSON object, for example '{{\"level\": 1}}'")
    return found


def finish(report: ConformanceReport, as_json: bool) -> None:
    """Prints a report and ends the process: with code 1 if a rule does not hold, otherwise 0.

    It does not wait for threads of the plug-in, which may hang.
    """
    if as_json:
        print_json(report.as_json())
    else:
        for line in report.lines():
            echo(line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if report.failed else 0)
