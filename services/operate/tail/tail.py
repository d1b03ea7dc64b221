"""Follows a topic without side effects: no consumer group, no dead letters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from headrace.services.kafka.broker import Record
from headrace.services.log.log_reader import Back, Start, follow_records
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.namespace_topics import find_topic
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
        start: Start = "first" if from_start else Back(max(LAST, limit or 0))
        starts = dict.fromkeys(find_topic(log.topics, name).all_partitions(), start)
        shown = 0
        async with aclosing(follow_records(log, starts)) as items:
            async for item in items:
                if isinstance(item, Record):
                    print_one(await readable_record(log, item))
                    shown += 1
                    if shown == limit:
                        return
