"""`headrace topics`: lists the topics of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_options,
    in_namespace,
    json_option,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife


@click.command()
@json_option
@cluster_options
def topics(as_json: bool, **options: Any) -> None:
    """List the topics of a namespace.

    Prints each topic's event, partitions, records, only writer, and retention in a new namespace.
    The number of records includes the markers that Kafka writes at the end of each transaction.

    \b
    Examples:
      headrace topics
      headrace topics --namespace exp-7 --json
    """
    rows = in_namespace(options, "topics", _list_topics)
    if as_json:
        print_json(rows)
        return
    head = ("topic", "event", "partitions", "records", "writer", "kept")
    print_table(head, [[str(row[name]) for name in head] for row in rows])


async def _list_topics(log: EventLog, _: RunLife) -> list[dict[str, Any]]:
    """Returns every topic of a namespace as JSON values, in the order of the data flow.

    A namespace of an older version may lack some.
    """
    from headrace.schemas.topics import RETENTION_MS

    rows = []
    existing = await log.broker.list_topics()
    for topic in (one for one in log.topics if one.name in existing):
        kept_ms = RETENTION_MS[topic.topic.kept]
        bounds = (await log.broker.ends(topic.all_partitions())).values()
        rows.append(
            {
                "topic": topic.name,
                "event": "bytes" if topic.topic.event is None else topic.topic.event.__name__,
                "partitions": topic.partitions,
                "records": sum(end - first for first, end in bounds),
                "ends": [end for _, end in bounds],
                "writer": topic.topic.writer,
                "kept": _spell(kept_ms),
            }
        )
    return rows


def _spell(kept_ms: int) -> str:
    from headrace.schemas.topics import DAY_MS, HOUR_MS

    if kept_ms < 0:
        return "forever"
    return f"{kept_ms / DAY_MS:g} days" if kept_ms >= DAY_MS else f"{kept_ms / HOUR_MS:g} h"
