"""Lists the topics of a namespace with their sizes."""

from __future__ import annotations

from typing import Any

from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace


async def list_topics(cluster: ClusterConfig) -> list[dict[str, Any]]:
    """Returns every topic of a namespace as JSON values, in the order of the data flow."""
    rows = []
    async with open_namespace(cluster, "topics") as (log, _):
        for topic in log.topics:
            bounds = (await log.broker.ends(topic.all_partitions())).values()
            rows.append(
                {
                    "topic": topic.name,
                    "event": "bytes" if topic.topic.event is None else topic.topic.event.__name__,
                    "partitions": topic.partitions,
                    # Offsets also count the markers of transactions.
                    "records": sum(end - first for first, end in bounds),
                    "ends": [end for _, end in bounds],
                    "writer": topic.topic.writer,
                    "kept": topic.topic.kept,
                }
            )
    return rows
