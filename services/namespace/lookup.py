"""Finds the namespaces of a broker, and their partitions and policies, from the topics' names."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import takewhile

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    BATCHES,
    EPISODES,
    NAME,
    POOL_PARTITIONS,
    PROMPTS,
    RUNS,
    Topics,
)
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection, connect, locate
from headrace.services.namespace.run_life import RunLife, read_lives

_RUNS = re.compile(rf"([a-z0-9_-]+)\.{RUNS.name}\.v1")


MOST_RUNS = 10_000
"""How many names `<name>-2`, `<name>-3`, … are tried for a new run."""


def run_names(first: str) -> Iterator[str]:
    """Yields `<name>`, `<name>-2`, and so on: the names that a new run tries in turn."""
    yield first
    for number in range(2, MOST_RUNS):
        yield f"{first}-{number}"


def namespaces_in(existing: Mapping[str, int]) -> list[str]:
    """Returns the names of all namespaces that a broker's topics belong to, sorted.

    Other programs may have topics whose names look so, but no namespace can have such a name.
    """
    matches = (_RUNS.fullmatch(name) for name in existing)
    return sorted(match[1] for match in matches if match is not None and NAME.match(match[1]))


def topics_of(recipe: Recipe, namespace: str) -> Topics:
    """Returns the topics of a recipe's namespace."""
    return Topics(
        namespace,
        tuple(recipe.policies),
        recipe.partitions,
        recipe.reads_from,
        recipe.pool_partitions,
        {name: policy.signers for name, policy in recipe.policies.items()},
        recipe.scheduler.trusted,
    )


def topics_in(existing: Mapping[str, int], namespace: str) -> Topics:
    """Returns a namespace's topics. Raises UsageError if the broker lacks some or all of them."""
    names = ", ".join(namespaces_in(existing)) or "(none)"
    partitions = existing.get(EPISODES.real_name(namespace))
    if namespace not in namespaces_in(existing) or partitions is None:
        raise UsageError(
            f"no namespace {namespace!r} on this broker, which has: {names}. "
            "`headrace apply RECIPE` creates one"
        )
    batches = re.compile(rf"{re.escape(namespace)}\.{BATCHES.name}\.([a-z0-9_-]+)\.v1")
    policies = [match[1] for name in existing if (match := batches.fullmatch(name))]
    prompts = [PROMPTS.real_name(namespace, policy) for policy in policies]
    found = {existing[name] for name in prompts if name in existing}
    pool = found.pop() if found else POOL_PARTITIONS
    return Topics(namespace, sorted(policies), partitions, pool_partitions=pool)


async def find_runs(connection: Connection, recipe: Recipe, first: str) -> dict[str, RunLife]:
    """Returns the lives of the runs `<first>`, `<first>-2`, and so on, as far as they exist."""
    existing = await connection.broker.list_topics()
    names = list(takewhile(lambda name: RUNS.real_name(name) in existing, run_names(first)))
    lives = await read_lives([connection.log(topics_of(recipe, name)) for name in names])
    return dict(zip(names, lives, strict=True))


@asynccontextmanager
async def open_namespace(
    cluster: ClusterConfig, source: str, *, writing: bool = False
) -> AsyncIterator[tuple[EventLog, RunLife]]:
    """Opens the log and reads the life of `cluster.namespace`, or else of the newest run.

    A replay is the newest run only if there is nothing else.
    """
    cluster = locate(cluster)
    async with connect(cluster, source) as connection:
        topics, life = await find_namespace(connection, cluster.namespace)
        log = await connection.writing_log(topics) if writing else connection.log(topics)
        yield log, life


async def find_namespace(
    connection: Connection,
    name: str | None,
    preferred: Callable[[RunLife], bool] = lambda life: life.replay_of is None,
) -> tuple[Topics, RunLife]:
    """Returns the topics and the life of the namespace `name`.

    If `name` is None, it takes the newest run for which `preferred` is true; without such a run,
    the newest one that is not a replay; and without that, the newest one. Namespaces that lack
    topics are left out, since somebody creates them just now, or has only deleted some. Raises
    UsageError if the broker has no namespace `name`, or has no namespace and `name` is None.
    """
    existing = await connection.broker.list_topics()
    whole = [one for one in namespaces_in(existing) if EPISODES.real_name(one) in existing]
    every = [topics_in(existing, each) for each in (whole if name is None else [name])]
    lives = await read_lives([connection.log(topics) for topics in every])
    if not every:
        raise UsageError(
            "this broker has no run. `headrace run` or `headrace apply RECIPE` starts one"
        )

    def rank(pair: tuple[Topics, RunLife]) -> tuple[bool, bool, float]:
        return preferred(pair[1]), pair[1].replay_of is None, pair[1].started_at

    topics, life = max(zip(every, lives, strict=True), key=rank)
    return Topics(
        topics.namespace,
        topics.policies,
        topics.partitions,
        life.reads_from,
        topics.pool_partitions,
        life.signers,
        life.trusted,
    ), life
