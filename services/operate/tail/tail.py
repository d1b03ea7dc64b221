"""Follows a topic without side effects: no consumer group, no dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.services.kafka.broker import Record
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.namespace_topics import find_topic, partitions_of
from headrace.services.operate.readable import readable_record

LAST = 10
"""Records of each partition that a tail shows first."""


async def tail_topic(
    cluster: ClusterConfig,
    name: str,
    print_one: Callable[[dict[str, Any]], None],
    *,
    from_start: bool,
    limit: int | None,
) -> None:
    """Passes a topic's records to `print_one` as JSON values, until `limit` or without end."""
    async with open_namespace(cluster, "tail") as (log, _):
        bounds = await log.broker.ends(partitions_of(find_topic(log.topics, name)))
        last = max(LAST, limit or 0)
        reader = log.broker.reader()
        try:
            await reader.assign(
                {
                    partition: first if from_start else max(first, end - last)
                    for partition, (first, end) in bounds.items()
                }
            )
            shown = 0
            while True:
                for item in await reader.read():
                    if isinstance(item, Record):
                        print_one(await readable_record(log, item))
                        shown += 1
                        if shown == limit:
                            return
        finally:
            await reader.close()
