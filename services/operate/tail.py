"""Looks into a namespace's topics without leaving a trace: no consumer group, no dead letters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

from headrace.errors import DecodeError, UsageError
from headrace.schemas.topics import NamespaceTopic, Topics
from headrace.services.kafka.broker import Record
from headrace.services.log.event_log import WHY, EventLog
from headrace.services.log.log_reader import Back, Start, follow_records
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.readable import readable

LAST = 10
"""Records of each partition that a tail begins with."""


async def tail_topic(
    cluster: ClusterConfig,
    name: str,
    print_one: Callable[[dict[str, Any]], None],
    *,
    from_start: bool,
    limit: int | None,
) -> None:
    """Hands on a topic's records as JSON values, for ever or until `limit`."""
    async with open_namespace(cluster, "tail") as (log, _):
        placed = find_topic(log.topics, name)
        start: Start = "first" if from_start else Back(max(LAST, limit or 0))
        shown = 0
        starts = dict.fromkeys(placed.all_partitions(), start)
        async with aclosing(follow_records(log, starts)) as items:
            async for item in items:
                if isinstance(item, Record):
                    print_one(await tree_of(log, item))
                    shown += 1
                    if shown == limit:
                        return


def find_topic(topics: Topics, name: str) -> NamespaceTopic:
    """The topic that a person means: `results`, `batches.default`, or the whole name.

    UsageError names those that there are.
    """
    named = {short_name(placed): placed for placed in topics}
    for placed in topics:
        if name in (placed.name, short_name(placed)):
            return placed
    of_policies = [placed for placed in topics if placed.topic.name == name]
    if len(of_policies) == 1:
        return of_policies[0]
    raise UsageError(f"no topic {name!r} in {topics.namespace}; it has: {', '.join(named)}")


def short_name(placed: NamespaceTopic) -> str:
    """A topic's name without namespace and version: `results`, `batches.default`."""
    return placed.topic.name if placed.policy is None else f"{placed.topic.name}.{placed.policy}"


async def tree_of(log: EventLog, record: Record) -> dict[str, Any]:
    """A record as JSON values: its place, and the event, or what there is instead."""
    tree: dict[str, Any] = {
        "topic": record.partition.topic,
        "partition": record.partition.number,
        "offset": record.offset,
        "at": datetime.fromtimestamp(record.timestamp, UTC).isoformat(timespec="milliseconds"),
    }
    try:
        event = (await log.decode(record)).event
    except DecodeError as error:
        return {**tree, "type": "undecodable", "id": "", "event": _raw(record, error)}
    return {**tree, "type": type(event).__name__, "id": event.event_id, "event": readable(event)}


def _raw(record: Record, error: DecodeError) -> dict[str, Any]:
    headers = {
        name.removeprefix(WHY): text.decode(errors="replace")
        for name, text in record.headers
        if name.startswith(WHY)
    }
    value = record.value or b""
    reason = headers or {"reason": error.reason}
    return {**reason, "value": value[:256].hex(), "bytes": len(value)}


async def list_topics(cluster: ClusterConfig) -> list[dict[str, Any]]:
    """Every topic of a namespace, in the order of the flow."""
    async with open_namespace(cluster, "topics") as (log, _):
        bounds = await log.broker.ends(
            [partition for placed in log.topics for partition in placed.all_partitions()]
        )
    rows = []
    for placed in log.topics:
        ends = [bounds[partition] for partition in placed.all_partitions()]
        rows.append(
            {
                "topic": placed.name,
                "event": "bytes" if placed.topic.event is None else placed.topic.event.__name__,
                "partitions": placed.partitions,
                # Transactions' own marks count among them.
                "records": sum(end - first for first, end in ends),
                "ends": [end for _, end in ends],
                "writer": placed.topic.writer,
                "kept": placed.topic.kept,
            }
        )
    return rows
