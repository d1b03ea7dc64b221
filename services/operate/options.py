"""Options that commands share, and functions that open a namespace and print data."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from headrace.schemas.recipe.recipe import Recipe
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.show.pages import Part

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters of terminals, and those that change the direction of text."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Returns a decorator that adds several options to a command, in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


state_option = click.option(
    "--state", metavar="FOLDER", type=click.Path(file_okay=False), default=".headrace",
    envvar="HEADRACE_STATE", show_default=True, show_envvar=True,
    help="Folder of the local stack, logs, caches and checkpoints.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
quiet_option = click.option("--quiet", is_flag=True, help="Do not show progress.")
set_option = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="Override a key of the recipe, for example scheduler.live_episodes=64. Repeatable. "
    "Environment variables do the same: HEADRACE__SCHEDULER__LIVE_EPISODES=64.",
)  # fmt: skip
policy_option = click.option(
    "--policy", metavar="NAME", help="Policy of the run. [default: its only one]"
)
version_option = click.option(
    "--version", type=click.IntRange(min=0), help="Version of the policy. [default: the newest]"
)
metrics_options = together(
    click.option(
        "--metrics-port", metavar="PORT", type=click.IntRange(0, 65_535), default=0,
        show_default=True, help="Serve Prometheus metrics at /metrics on this port. 0 disables "
        "them.",
    ),
    click.option(
        "--metrics-address", metavar="HOST", default="127.0.0.1", show_default=True,
        help="Address on which /metrics listens.",
    ),
)  # fmt: skip
"""Adds `--metrics-port` and `--metrics-address`."""
cluster_options = together(
    click.option(
        "--bootstrap-servers", metavar="HOST:PORT", envvar="HEADRACE_BOOTSTRAP_SERVERS",
        show_envvar=True, help="Kafka brokers, separated by commas. [default: the local stack]",
    ),
    click.option(
        "--registry-url", metavar="URL", envvar="HEADRACE_REGISTRY_URL", show_envvar=True,
        help="Confluent-compatible schema registry. Required with --bootstrap-servers.",
    ),
    click.option(
        "--blobs", metavar="FOLDER|URL", envvar="HEADRACE_BLOBS", show_envvar=True,
        help="Store of weights that all workers share, for example s3://bucket/runs. "
        "[default: <state>/blobs]",
    ),
    state_option,
    click.option(
        "--namespace", metavar="NAME", envvar="HEADRACE_NAMESPACE", show_envvar=True,
        help="Prefix of the run's topics. [default: the recipe's name; for commands without a "
        "RECIPE, the run that started last; name a replay to use it]",
    ),
    click.option(
        "--kafka-property", "kafka_properties", metavar="KEY=VALUE", multiple=True,
        envvar="HEADRACE_KAFKA_PROPERTIES", show_envvar=True,
        help="A librdkafka property, for example security.protocol=SSL. Repeatable.",
    ),
    click.option(
        "--credentials", metavar="FOLDER|FILE", envvar="HEADRACE_CREDENTIALS", show_envvar=True,
        type=click.Path(), help="A folder with a file SERVICE.properties of librdkafka properties "
        "for each service, and operator.properties for commands; or one such file.",
    ),
)  # fmt: skip
"""Adds the options that `cluster_of` reads."""


def cluster_of(options: dict[str, Any], role: str | None = None) -> ClusterConfig:
    """Removes the cluster options from a command's options and returns them as a configuration.

    `role` is the command's role, if it is not the operator's.

    Raises UsageError if they contradict each other.
    """
    from headrace.services.namespace.cluster_config import ClusterConfig, credentials_of
    from headrace.services.namespace.credentials import OPERATOR, parse_properties

    return ClusterConfig(
        state=Path(options.pop("state")),
        bootstrap_servers=options.pop("bootstrap_servers") or None,
        registry_url=options.pop("registry_url") or None,
        blobs=options.pop("blobs") or None,
        namespace=options.pop("namespace") or None,
        kafka_properties=parse_properties(options.pop("kafka_properties")),
        credentials=credentials_of(options.pop("credentials")),
        role=role or OPERATOR,
    )


def in_namespace(
    options: dict[str, Any],
    source: str,
    work: Callable[[EventLog, RunLife], Awaitable[T]],
    *,
    writing: bool = False,
    role: str | None = None,
) -> T:
    """Runs `work` on the log and the life of the namespace that the cluster options name.

    Unless `writing`, the log is read-only. `source` names the command to the broker. `role` is that
    of `cluster_of`.
    """
    import asyncio

    from headrace.services.namespace.lookup import open_namespace

    cluster = cluster_of(options, role)

    async def run() -> T:
        async with open_namespace(cluster, source, writing=writing) as (log, life):
            return await work(log, life)

    return asyncio.run(run())


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """Prints data to stdout as JSON, and flushes it."""
    echo(json.dumps(data, indent=indent, ensure_ascii=False))


def print_table(head: tuple[str, ...], rows: list[list[str]], *, indent: int = 0) -> None:
    """Prints a table to stdout: styled on a terminal, otherwise as plain columns."""
    rows = [[visible(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.markup import escape
        from rich.padding import Padding
        from rich.table import Table

        table = Table(*head, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*map(escape, row))
        Console().print(Padding(table, (0, 0, 0, indent)))
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [list(head), *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        echo(" " * indent + "  ".join(cells).rstrip())


def print_page(page: Sequence[Part]) -> None:
    """Prints lines and tables to stdout. On a terminal headings are bold."""
    for part in page:
        if not isinstance(part, str):
            print_table(part.head, part.rows, indent=2)
        elif part.startswith(" "):
            echo(part)
        else:
            echo(part, bold=True)


def say(line: str) -> None:
    """Prints a remark to stderr."""
    echo(line, err=True)


def say_unless(quiet: bool) -> Callable[[str], None]:
    """Returns `say`, or what prints nothing if the command is `quiet`."""
    return (lambda line: None) if quiet else say


def warn_of_secrets(recipe: Recipe) -> None:
    """Warns on stderr of each value in a recipe that looks like a secret."""
    from headrace.schemas.recipe.secret_references import literal_secrets

    for key in literal_secrets(recipe.model_dump(mode="json")):
        name = next((part for part in reversed(key.split(".")) if not part.isdecimal()), key)
        say(
            f"warning: {key} looks like a secret, and the topic `runs` keeps the recipe for ever. "
            f'Write {name} = {{ env = "NAME" }} and set the variable NAME where the workers run, '
            f'or write {name} = {{ file = "/path" }}'
        )


def visible(text: str) -> str:
    r"""Returns a text in which control characters, but for tab and line feed, look like `\u001b`.

    Texts of policies and other teams must not move the cursor, change colours or reorder letters on
    the operator's terminal. In JSON the result means the same.
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def echo(text: str, *, err: bool = False, bold: bool = False) -> None:
    """Prints a text to stdout, or to stderr with `err`. Control characters become visible."""
    click.echo(click.style(visible(text), bold=True) if bold else visible(text), err=err)
