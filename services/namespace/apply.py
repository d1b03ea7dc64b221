"""Makes a namespace: topics, schemas, first offsets, and the record that its run has started.

Idempotent: what is there stays. The order matters, since each step relies on those before it: a
run that has started has its topics, and each consumer group a place in them.
"""

from __future__ import annotations

import json
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
from headrace.services.namespace.retention import check_recipe, require_kept
from headrace.services.namespace.run_life import RunLife, differing_keys, read_life

RECORD_OVERHEAD_BYTES = 64 * 1024
"""Of a batch of one record: its framing, key and headers."""
PACKAGES = ("headrace", "confluent-kafka", "fastavro", "faust-streaming", "torch", "transformers")
"""Whose versions the run's record names."""

CONSUMERS: dict[str, Topic[Any]] = {
    "scheduler": TASKS,
    "agent": EPISODES,
    "env": ACTIONS,
    "inference": PROMPTS,
    "assemble-groups": RESULTS,
}
"""Service to the topic that its consumer group shares."""


async def apply(log: EventLog, recipe: Recipe, reason: str = "") -> RunLife:
    """Makes the log's namespace for a recipe, and starts its run unless it has started.

    `reason` is what its record gives for the start.
    UsageError where the namespace has a run of another recipe, or other numbers of partitions, or
    topics that would lose what is still needed.
    """
    existing = await find_run(log)
    if existing is not None:
        require_same(existing, recipe, log.topics.namespace)
    check_recipe(recipe)
    there = await log.broker.list_topics()
    names = [placed.name for placed in log.topics if placed.name in there]
    require_kept(log.topics, recipe, await log.broker.topic_settings(names))
    await log.broker.create_topics(
        {placed.name: (placed.partitions, _configuration(placed.topic)) for placed in log.topics}
    )
    await commit_first_places(log.broker, log.topics)
    life = await read_life(log)
    if life.started is None:
        await log.send(_started(log.topics.namespace, recipe, reason))
        # Read back: of two at once, the first in the log has started the run.
        life = await read_life(log)
    require_same(life, recipe, log.topics.namespace)
    return life


async def find_run(log: EventLog) -> RunLife | None:
    """The namespace's run; None where there is no such namespace on the broker."""
    if log.topics.name(RUNS) not in await log.broker.list_topics():
        return None
    return await read_life(log)


async def commit_first_places(broker: Broker, topics: Topics) -> None:
    """Gives every consumer group its place 0, where it has none: no reset is ever needed."""
    for service in CONSUMERS:
        group, partitions = shared_partitions(topics, service)
        await broker.commit_first(group, partitions)


def shared_partitions(topics: Topics, service: str) -> tuple[str, list[Partition]]:
    """A service's consumer group, and the partitions that its members share."""
    return f"{topics.namespace}.{service}", topics.partitions_of(CONSUMERS[service])


async def lags(broker: Broker, topics: Topics) -> dict[str, int]:
    """Records that each service has not done, by service: from its commit to the end."""
    result = {}
    for service in CONSUMERS:
        group, partitions = shared_partitions(topics, service)
        ends = await broker.ends(partitions)
        committed = await broker.committed(group, partitions)
        result[service] = sum(
            max(0, end - (committed[place].offset if place in committed else first))
            for place, (first, end) in ends.items()
        )
    return result


def require_same(life: RunLife, recipe: Recipe, namespace: str) -> None:
    """UsageError where the run has another recipe; it names each key that differs."""
    started = life.started
    if started is None or started.digest == recipe.digest:
        return
    keys = differing_keys(recipe, json.loads(started.recipe))
    more = f"\n  … and {len(keys) - 12} more" if len(keys) > 12 else ""
    raise UsageError(
        f"namespace {namespace} has a run of another recipe, and a run keeps its recipe. Give "
        "another --namespace, or take these changes (theirs -> yours) back:"
        + "".join(f"\n  {key}" for key in keys[:12])
        + more
    )


def _configuration(topic: Topic[Any]) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(RETENTION_MS[topic.kept]),
        # Said, so that no cluster's default cuts by size what is still needed.
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
