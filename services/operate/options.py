"""What commands share: *where* options, recipe options, and how data is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.operate.show.pages import Part

F = TypeVar("F", bound=Callable[..., Any])

_STATE = click.option(
    "--state", type=click.Path(file_okay=False), default=".headrace", envvar="HEADRACE_STATE",
    show_default=True, show_envvar=True,
    help="Folder of the local stack, logs, caches and checkpoints.",
)  # fmt: skip
_PLACE = (
    click.option(
        "--bootstrap-servers", metavar="HOST:PORT", envvar="HEADRACE_BOOTSTRAP_SERVERS",
        show_envvar=True, help="Kafka; without it, the local stack of --state.",
    ),
    click.option(
        "--registry-url", metavar="URL", envvar="HEADRACE_REGISTRY_URL", show_envvar=True,
        help="Confluent-compatible schema registry; goes with --bootstrap-servers.",
    ),
    click.option(
        "--blobs", metavar="PLACE", envvar="HEADRACE_BLOBS", show_envvar=True,
        help="Store of weights, shared by all workers: a folder, or a URL as s3://bucket/runs. "
        "[default: <state>/blobs]",
    ),
    _STATE,
    click.option(
        "--namespace", metavar="NAME", envvar="HEADRACE_NAMESPACE", show_envvar=True,
        help="The run's topics are <namespace>.*. [default: the recipe's name]",
    ),
    click.option(
        "--kafka-property", "kafka_properties", metavar="KEY=VALUE", multiple=True,
        envvar="HEADRACE_KAFKA_PROPERTIES", show_envvar=True,
        help="A librdkafka property, as security.protocol=SSL. Repeatable.",
    ),
)  # fmt: skip

state_option = _STATE
json_option = click.option("--json", "as_json", is_flag=True, help="JSON to stdout.")
set_option = click.option(
    "--set", "settings", metavar="KEY=VALUE", multiple=True,
    help="Overrides a key of the recipe, as scheduler.live_episodes=64; so does the environment, "
    "as HEADRACE__SCHEDULER__LIVE_EPISODES=64. Repeatable.",
)  # fmt: skip


def cluster_options(command: F) -> F:
    """Adds the options that `cluster_of` reads."""
    for option in reversed(_PLACE):
        command = option(command)
    return command


def cluster_of(options: dict[str, Any]) -> ClusterConfig:
    """Takes the *where* options out of a command's options. UsageError for impossible ones."""
    from headrace.services.namespace.cluster_config import ClusterConfig

    return ClusterConfig(
        state=Path(options.pop("state")),
        bootstrap_servers=options.pop("bootstrap_servers") or None,
        registry_url=options.pop("registry_url") or None,
        blobs=options.pop("blobs") or None,
        namespace=options.pop("namespace") or None,
        kafka_properties=_properties(options.pop("kafka_properties")),
    )


def _properties(texts: Sequence[str]) -> dict[str, str]:
    properties = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r}: it takes key=value", param_hint="--kafka-property")
        properties[key.strip()] = value
    return properties


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """Data to stdout, at once."""
    click.echo(json.dumps(data, indent=indent, ensure_ascii=False))
    sys.stdout.flush()


def print_table(head: tuple[str, ...], rows: list[list[str]], *, indent: int = 0) -> None:
    """A table to stdout: drawn on a terminal, plain columns elsewhere."""
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
    widths = [max(len(row[column]) for row in [list(head), *rows]) for column in range(len(head))]
    for row in [list(head), *rows]:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(" " * indent + "  ".join(cells).rstrip())


def print_page(page: Sequence[Part]) -> None:
    """Lines and tables to stdout; headings stand out on a terminal."""
    for part in page:
        if not isinstance(part, str):
            print_table(part.head, part.rows, indent=2)
        elif part.startswith(" "):
            click.echo(part)
        else:
            click.secho(part, bold=True)


def explain(line: str) -> None:
    """A remark to stderr."""
    click.echo(line, err=True)
