"""Starts a run in its namespace: the name that was given, or the next one that is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.namespace.apply import open_and_apply
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import (
    MOST_RUNS,
    find_namespace,
    find_runs,
    run_names,
    topics_of,
)
from headrace.services.namespace.run_life import RunLife, enter
from headrace.services.operate.acls.grant import grant_access
from headrace.services.operate.run.progress import Progress
from headrace.services.operate.run.run_stack import RunStack
from headrace.services.operate.run.watch import read_recent

RECENT = 64
"""Offsets of each partition that are read to find out whether a run has trained."""
REPLACED = "replaced by another recipe"
MANY_RUNS = 30
"""From so many ended runs on, their topics noticeably delay the start of a local Kafka."""


async def open_run(
    connection: Connection,
    cluster: ClusterConfig,
    recipe: Recipe,
    wanted: str | None,
    services: Collection[str],
    stack: RunStack,
    checked: asyncio.Future[None],
    say: Callable[[str], None],
) -> tuple[EventLog, RunLife]:
    """Starts the run of a recipe once `checked` is done, or continues it. Raises its error.

    To make topics takes seconds. So they are made before that if it disturbs nobody: on a stack of
    this run that has no run of this name. If the check fails, they are deleted.
    """
    early = stack.ours and not await find_runs(connection, recipe, wanted or recipe.name)
    if not early:
        await checked
    namespace = await choose_namespace(connection, recipe, wanted, stack.ours, say)
    topics = topics_of(recipe, namespace)
    await grant_access(cluster, topics, services)
    try:
        opened, _ = await asyncio.gather(
            open_and_apply(connection, recipe, namespace, checked),
            stack.prepare_transactions(connection.broker),
        )
    except BaseException:
        if checked.cancelled() or (checked.done() and checked.exception() is not None):
            with suppress(HeadraceError):
                await connection.broker.delete_topics([topic.name for topic in topics])
        raise
    return opened


async def choose_namespace(
    connection: Connection,
    recipe: Recipe,
    wanted: str | None,
    alone: bool,
    say: Callable[[str], None],
) -> str:
    """Returns the first of `<name>`, `<name>-2`, … whose run has not ended or not started.

    `<name>` is `wanted`, or else the recipe's name. If this process is `alone` on its broker, it
    ends a run of another recipe that has trained nothing.
    """
    first, ended = wanted or recipe.name, 0
    runs = await find_runs(connection, recipe, first)
    for name in run_names(first):
        life = runs.get(name)
        if life is None:
            if name != first:
                say(f"the run of {first} has ended: the new one uses {name}")
            if alone and ended >= MANY_RUNS:
                say(
                    f"{ended} ended runs of {first} are kept, and delay Kafka's start: "
                    "`headrace prune --forget NAMESPACE --yes` removes one"
                )
            return name
        if life.ended is not None:
            ended += 1
            continue
        if not (alone and await _is_replaced(connection, recipe, name, life)):
            say(f"continuing the unfinished run of namespace {name}")
            return name
        say(f"the run of namespace {name} has another recipe and has trained nothing: it is ended")
    raise UsageError(
        f"all namespaces from {first} to {first}-{MOST_RUNS - 1} have runs that ended: choose "
        "another --namespace"
    )


async def _is_replaced(connection: Connection, recipe: Recipe, name: str, life: RunLife) -> bool:
    """Ends a run of another recipe, if it has trained nothing. Returns whether it did."""
    if life.started is None or life.started.digest == recipe.digest:
        return False
    topics, _ = await find_namespace(connection, name)
    log, theirs = await connection.writing_log(topics), Progress(life.recipe())
    await read_recent(log, theirs, RECENT)
    if any(version > 0 for version in theirs.versions().values()):
        return False
    await enter(log, "ending", theirs.recipe, REPLACED)
    await enter(log, "ended", theirs.recipe, REPLACED)
    return True
