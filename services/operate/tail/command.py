"""`headrace tail`: follows a topic."""

from __future__ import annotations

import json
import sys
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import cluster_options, in_namespace, json_option, print_json

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.log.log_reader import Start
    from headrace.services.namespace.run_life import RunLife

LAST = 10
"""Records of each partition that a tail shows first."""


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
    from headrace.services.kafka.broker import Record
    from headrace.services.log.log_reader import Back, follow_records
    from headrace.services.operate.namespace_topics import find_topic
    from headrace.services.operate.readable import readable_record

    pretty = sys.stdout.isatty() and not as_json
    print_one = _pretty if pretty else lambda tree: print_json(tree, indent=None)

    async def follow(log: EventLog, _: RunLife) -> None:
        start: Start = "first" if from_start else Back(max(LAST, limit or 0))
        starts = dict.fromkeys(find_topic(log.topics, topic).all_partitions(), start)
        shown = 0
        async with aclosing(follow_records(log, starts)) as items:
            async for item in items:
                if isinstance(item, Record):
                    print_one(await readable_record(log, item))
                    shown += 1
                    if shown == limit:
                        return

    with suppress(KeyboardInterrupt):
        in_namespace(options, "tail", follow)
        return
    sys.exit(130)


def _pretty(tree: dict[str, Any]) -> None:
    from rich import print_json as print_colored

    location = f"{tree['topic']}/{tree['partition']}@{tree['offset']}"
    click.secho(f"{tree['at']}  {tree['type']}  {location}  {tree['id']}", bold=True)
    print_colored(json.dumps(tree["event"]), indent=None)
