"""`headrace tail`: follows a topic."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import click

from headrace.services.operate.options import cluster_of, cluster_options, json_option, print_json


@click.command()
@click.argument("topic")
@click.option("--from-start", is_flag=True, help="Start at the first record that is kept.")
@click.option(
    "-n", "limit", metavar="COUNT", type=click.IntRange(min=1),
    help="Stop after this many records. [default: follow until Ctrl-C]",
)  # fmt: skip
@json_option
@cluster_options
def tail(topic: str, from_start: bool, limit: int | None, as_json: bool, **options: Any) -> None:
    """Follow the events of a TOPIC.

    Shows the last 10 records of each partition, then new records. Packed arrays are shown as lists
    and digests as hexadecimal text. Each record is one line of JSON, unless stdout is a terminal.
    The command only reads: it has no consumer group and writes no dead letters. `headrace topics`
    lists the topics.

    \b
    Examples:
      headrace tail results
      headrace tail batches.default -n 1 --json
      headrace tail trajectories --from-start --json | jq .event.reward
    """
    import asyncio

    from headrace.services.operate.tail.tail import tail_topic

    pretty = sys.stdout.isatty() and not as_json
    print_one = _pretty if pretty else lambda tree: print_json(tree, indent=None)
    cluster = cluster_of(options)
    with suppress(KeyboardInterrupt):
        asyncio.run(tail_topic(cluster, topic, print_one, from_start=from_start, limit=limit))
        return
    sys.exit(130)


def _pretty(tree: dict[str, Any]) -> None:
    from rich import print_json as print_colored

    location = f"{tree['topic']}/{tree['partition']}@{tree['offset']}"
    click.secho(f"{tree['at']}  {tree['type']}  {location}  {tree['id']}", bold=True)
    print_colored(json.dumps(tree["event"]), indent=None)
