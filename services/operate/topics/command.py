"""`headrace topics`: lists the topics of a namespace."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    print_json,
    print_table,
)


@click.command()
@json_option
@cluster_options
def topics(as_json: bool, **options: Any) -> None:
    """List the topics of a namespace.

    Prints each topic's event, partitions, records, only writer and retention. The number of records
    includes the markers that Kafka writes at the end of each transaction.

    \b
    Examples:
      headrace topics
      headrace topics --namespace exp-7 --json
    """
    import asyncio

    from headrace.services.operate.topics.topic_list import list_topics

    rows = asyncio.run(list_topics(cluster_of(options)))
    if as_json:
        print_json(rows)
        return
    head = ("topic", "event", "partitions", "records", "writer", "kept")
    print_table(head, [[str(row[name]) for name in head] for row in rows])
