"""Creates a namespace: its topics, the first offsets, and the record that its run has started.

It is idempotent: what exists stays as it is. The order of the steps matters. If a run has started,
its topics exist, and each consumer group has committed offsets in them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import RunStateEntered
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    ACTIONS,
    EPISODES,
    MAX_RECORD_BYTES,
    PROMPTS,
    RESULTS,
    RETENTION_MS,
    RUNS,
    TASKS,
    Topic,
    Topics,
)
from headrace.services.kafka.broker import Broker, Partition
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import topics_of
from headrace.services.namespace.retention import check_recipe, require_kept
from headrace.services.namespace.run_life import RunLife, differing_keys, read_life

RECORD_OVERHEAD_BYTES = 64 * 1024
"""Bytes that Kafka adds to one record: batch framing, key and headers."""
COMPACTION_LAG_MS = 3_600_000
"""How long a compacted topic keeps older records of a key. A reader that needs less time for the
whole topic sees at least one record of each key."""
COMPACTED = {
    "min.compaction.lag.ms": str(COMPACTION_LAG_MS),
    "segment.ms": str(COMPACTION_LAG_MS),
    "segment.bytes": str(64 * 1024 * 1024),
}
"""Settings of a compacted topic. Kafka compacts closed segments only. By its defaults, a segment is
closed after a week or at 1 GiB, and each reader at its start would read all that came before."""
SHORT = {"segment.ms": "600000", "segment.bytes": str(16 * 1024 * 1024)}
"""Settings of a topic that is kept for an hour. Kafka deletes closed segments only."""
PACKAGES = ("headrace", "confluent-kafka", "fastavro", "faust-streaming", "torch", "transformers")
"""The packages whose versions the start of a run records."""

CONSUMERS: dict[str, Topic[Any]] = {
    "scheduler": TASKS,
    "agent": EPISODES,
    "env": ACTIONS,
    "inference": PROMPTS,
    "assemble-groups": RESULTS,
}
"""Service to the topic that its consumer group reads."""
OPTIONAL_CONSUMERS: dict[str, Topic[Any]] = {"project-turns": RESULTS}
"""The same for services that a run may go without. Nothing waits for them."""


async def apply(log: EventLog, recipe: Recipe, reason: str = "") -> RunLife:
    """Creates the log's namespace for a recipe, and starts its run unless it has started.

    The record of the start contains `reason`. Raises UsageError if the namespace has a run of
    another recipe or other numbers of partitions, or if its topics would lose needed records.
    """
    await make_topics(log, recipe)
    return await start_run(log, recipe, reason)


async def make_topics(log: EventLog, recipe: Recipe) -> None:
    """Does what `apply` does before the run starts. It writes no event, so `log` may be read-only.

    Raises the same errors as `apply`.
    """
    existing = await find_run(log)
    if existing is not None:
        require_same(existing, recipe, log.topics.namespace)
    check_recipe(recipe)
    existing_topics = await log.broker.list_topics()
    names = [topic.name for topic in log.topics if topic.name in existing_topics]
    require_kept(log.topics, recipe, await log.broker.topic_settings(names))
    await log.broker.create_topics(
        {topic.name: (topic.partitions, topic_configuration(topic.topic)) for topic in log.topics}
    )
    await commit_first_offsets(log.broker, log.topics)


async def start_run(log: EventLog, recipe: Recipe, reason: str = "") -> RunLife:
    """Starts the run of a namespace with all its topics, unless it has started.

    The record of the start contains `reason`. Raises UsageError if it has another recipe.
    """
    life = await read_life(log)
    if life.started is None:
        await log.send(_started(log.topics.namespace, recipe, reason))
        # Another process may have started the run at the same time: the first record counts.
        life = await read_life(log)
    require_same(life, recipe, log.topics.namespace)
    return life


async def open_and_apply(
    connection: Connection, recipe: Recipe, namespace: str, ready: Awaitable[None] | None = None
) -> tuple[EventLog, RunLife]:
    """Applies a recipe, and registers the schemas meanwhile. Returns the log, opened for writing.

    The run starts when `ready` has returned. Raises the errors of `apply`, `Connection.writing_log`
    and `ready`.
    """
    topics = topics_of(recipe, namespace)
    log, _ = await asyncio.gather(
        connection.writing_log(topics), make_topics(connection.log(topics), recipe)
    )
    if ready is not None:
        await ready
    return log, await start_run(log, recipe)


async def find_run(log: EventLog) -> RunLife | None:
    """Returns the namespace's run, or None if the broker has no such namespace."""
    if log.topics.name(RUNS) not in await log.broker.list_topics():
        return None
    return await read_life(log)


async def commit_first_offsets(broker: Broker, topics: Topics) -> None:
    """Commits offset 0 for every consumer group that has no offsets, so that none is ever reset."""
    for service in (*CONSUMERS, *OPTIONAL_CONSUMERS):
        group, partitions = shared_partitions(topics, service)
        await broker.commit_first(group, partitions)


def shared_partitions(topics: Topics, service: str) -> tuple[str, list[Partition]]:
    """Returns a service's consumer group, and the partitions that its members share."""
    return f"{topics.namespace}.{service}", topics.partitions_of(
        {**CONSUMERS, **OPTIONAL_CONSUMERS}[service]
    )


async def lags(
    broker: Broker, topics: Topics, services: Collection[str] = tuple(CONSUMERS)
) -> dict[str, int]:
    """Returns how many records each service has still to process: from its commit to the end."""
    result = {}
    for service in services:
        group, partitions = shared_partitions(topics, service)
        ends = await broker.ends(partitions)
        committed = await broker.committed(group, partitions)
        result[service] = sum(
            max(0, end - (committed[partition].offset if partition in committed else first))
            for partition, (first, end) in ends.items()
        )
    return result


def require_same(life: RunLife, recipe: Recipe, namespace: str) -> None:
    """Raises UsageError if the run has another recipe. The message names the keys that differ."""
    started = life.started
    if started is None or started.digest == recipe.digest:
        return
    keys = differing_keys(recipe, json.loads(started.recipe))
    more = f"\n  … and {len(keys) - 12} more" if len(keys) > 12 else ""
    raise UsageError(
        f"namespace {namespace} has a run of another recipe, and the recipe of a run can't change. "
        "Give another --namespace, or undo the changes below. To give the run up, end it with "
        f"`headrace end --namespace {namespace}`; `headrace prune --forget {namespace} --yes` then "
        "deletes all of it. The changes (theirs -> yours):"
        + "".join(f"\n  {key}" for key in keys[:12])
        + more
    )


def topic_configuration(topic: Topic[Any]) -> dict[str, str]:
    """Returns the settings of a topic on the broker, as text by name."""
    segments = COMPACTED if topic.compacted else SHORT if topic.kept == "hour" else {}
    return segments | {
        "cleanup.policy": "compact" if topic.compacted else "delete",
        "retention.ms": str(RETENTION_MS[topic.kept]),
        # Otherwise a default of the cluster could delete needed records by size.
        "retention.bytes": "-1",
        "max.message.bytes": str(MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES),
    }


def _started(namespace: str, recipe: Recipe, reason: str) -> RunStateEntered:
    return RunStateEntered(
        namespace=namespace,
        state="started",
        recipe=recipe.canonical(),
        digest=recipe.digest,
        reason=reason,
        versions={name: found for name in PACKAGES if (found := _version(name))},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
