"""`status`, `tail`, `topics`, `recipe`: what only looks."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    print_table,
    set_option,
)


@click.command()
@json_option
@cluster_options
def status(as_json: bool, **options: Any) -> None:
    """Where a run stands: state, versions, rewards, tasks, lag, dead letters.

    Without --namespace, the run that started last.

    \b
    Examples:
      headrace status
      headrace status --namespace quickstart --json
    """
    import asyncio

    from headrace.services.operate.run.run_status import read_run_status

    status = asyncio.run(read_run_status(cluster_of(options)))
    if as_json:
        print_json(status.to_tree())
    else:
        click.echo("\n".join(status.lines()))


@click.command()
@click.argument("topic")
@click.option("--from-start", is_flag=True, help="From the first record that is kept.")
@click.option("-n", "limit", type=click.IntRange(min=1), help="End after so many records.")
@json_option
@cluster_options
def tail(topic: str, from_start: bool, limit: int | None, as_json: bool, **options: Any) -> None:
    """Follow a TOPIC's events: the last 10 of each partition, then what comes. Ctrl-C ends it.

    Packed arrays are shown as lists and digests as hex. One JSON object a line, unless stdout is a
    terminal. Reads only: no consumer group, no dead letters.

    \b
    Examples:
      headrace tail results
      headrace tail batches.default -n 1 --json
      headrace tail trajectories --from-start --json | jq .event.reward
    """
    import asyncio

    from headrace.services.operate.tail import tail_topic

    pretty = sys.stdout.isatty() and not as_json
    print_one = _pretty if pretty else lambda tree: print_json(tree, indent=None)
    cluster = cluster_of(options)
    with suppress(KeyboardInterrupt):
        asyncio.run(tail_topic(cluster, topic, print_one, from_start=from_start, limit=limit))
        return
    sys.exit(130)


def _pretty(tree: dict[str, Any]) -> None:
    from rich import print_json as print_colored

    place = f"{tree['topic']}/{tree['partition']}@{tree['offset']}"
    click.secho(f"{tree['at']}  {tree['type']}  {place}  {tree['id']}", bold=True)
    print_colored(json.dumps(tree["event"]), indent=None)


@click.command()
@json_option
@cluster_options
def topics(as_json: bool, **options: Any) -> None:
    """A namespace's topics: partitions, records, sole writer, retention.

    Without --namespace, those of the run that started last.

    \b
    Examples:
      headrace topics
      headrace topics --namespace exp-7 --json
    """
    import asyncio

    from headrace.services.operate.tail import list_topics

    rows = asyncio.run(list_topics(cluster_of(options)))
    if as_json:
        print_json(rows)
        return
    head = ("topic", "event", "partitions", "records", "writer", "kept")
    print_table(head, [[str(row[name]) for name in head] for row in rows])


@click.command()
@click.argument("name", required=False)
@set_option
@json_option
def recipe(name: str | None, settings: tuple[str, ...], as_json: bool) -> None:
    """List the shipped recipes, or print one whole: every key, overrides applied.

    \b
    Examples:
      headrace recipe
      headrace recipe quickstart > my.toml
      headrace recipe my.toml --set stop.versions=10 --json
    """
    from headrace.services.namespace.cluster_config import RECIPES, read_recipe
    from headrace.services.operate.toml import to_toml

    if name is not None:
        resolved = read_recipe(name, settings)
        if as_json:
            print_json(json.loads(resolved.canonical()))
        else:
            click.echo(to_toml(resolved.model_dump(mode="json")), nl=False)
        return
    if settings:
        raise click.UsageError("--set goes with the NAME of a recipe")
    found = [read_recipe(str(path)) for path in sorted(RECIPES.glob("*.toml"))]
    if as_json:
        print_json([{"name": one.name, "description": one.description} for one in found])
    elif found:
        print_table(("recipe", "description"), [[one.name, one.description] for one in found])
    else:
        explain(f"no recipe in {RECIPES}")
