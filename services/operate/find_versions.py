"""Finds versions in the log, and resolves the references of recipes to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection, connect
from headrace.services.namespace.lookup import find_namespace, find_runs
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.run_references import (
    adopt,
    fetch_models,
    references,
    store_version,
    with_models,
)
from headrace.services.operate.run_versions import RunVersion, description_of

Versions = Mapping[str, RunVersion | None]
"""Each policy of a run, and its version. None if the policy has no such version."""


async def find_versions(
    cluster: ClusterConfig,
    version: int | None,
    say: Callable[[str], None],
    *,
    whole_run: bool = False,
) -> Versions:
    """Returns each policy of the run in `cluster`, at a version or at its newest.

    With `whole_run`, the policies that the run does not train come at the version that they have.
    Starts the local stack for the moment if none runs. Raises UsageError if there is no such run.
    """
    async with (
        running_stack(cluster, say) as (_, located),
        connect(located, "versions") as connection,
    ):
        return await _versions(connection, cluster, cluster.namespace, version, say, whole_run)


async def _versions(
    connection: Connection,
    cluster: ClusterConfig,
    namespace: str | None,
    version: int | None,
    say: Callable[[str], None],
    whole_run: bool = False,
) -> Versions:
    topics, life = await find_namespace(connection, namespace)
    recipe = life.recipe()
    assert life.started is not None
    run = {"recipe_digest": life.started.digest.hex(), "packages": dict(life.started.versions)}
    found = await publications(connection.log(topics), version)
    if whole_run and version is not None:
        newest = await publications(connection.log(topics), None)
        frozen = {name for name, policy in recipe.policies.items() if policy.training is None}
        found |= {name: one for name, one in newest.items() if name in frozen}
    await asyncio.to_thread(fetch_models, recipe, cluster, say, weights=False)
    return {
        name: RunVersion(
            topics.namespace,
            found[name],
            description_of(policy.model),
            run,
            policy.sampling,
            policy.chat_template_kwargs,
        )
        if name in found
        else None
        for name, policy in recipe.policies.items()
    }


async def read_versions(log: EventLog, policy: str) -> dict[int, PolicyPublished]:
    """Reads a policy's versions, ascending. The last record of a version counts.

    A version that was skipped once stays skipped. A version that was published again, after a
    restart, keeps the metrics of its training.
    """
    found: dict[int, PolicyPublished] = {}
    async with aclosing(read_events(log, {log.topics.partition(POLICIES): WHOLE})) as deliveries:
        async for delivery in deliveries:
            one = delivery.event
            if not isinstance(one, PolicyPublished) or one.policy != policy:
                continue
            if (before := found.get(one.version)) is not None:
                status = "skipped" if before.status == "skipped" else one.status
                metrics = one.metrics or before.metrics
                one = one.model_copy(update={"status": status, "metrics": metrics})
            found[one.version] = one
    return dict(sorted(found.items()))


async def publications(log: EventLog, version: int | None) -> dict[str, PolicyPublished]:
    """Returns each policy's publication of a version, or its newest publication."""
    found: dict[str, PolicyPublished] = {}
    policies = log.topics.partition(POLICIES)
    async with aclosing(read_events(log, {policies: WHOLE})) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if not isinstance(event, PolicyPublished) or version not in (None, event.version):
                continue
            known = found.get(event.policy)
            if known is None or event.version >= known.version:
                found[event.policy] = event
    return found


def pick(found: Versions, policy: str | None, version: int | None) -> RunVersion:
    """Returns the version of `policy`, or of the only policy. Raises UsageError if it is absent."""
    if policy is None and len(found) != 1:
        raise UsageError(f"name a policy of the run with --policy: {', '.join(sorted(found))}")
    name = policy if policy is not None else next(iter(found))
    chosen = found.get(name)
    if name not in found:
        raise UsageError(f"the run has no policy {name!r}: it has {', '.join(sorted(found))}")
    if chosen is None:
        which = "no version yet" if version is None else f"no version {version}"
        raise UsageError(
            f"policy {name!r} of the run has published {which}: `headrace status` shows its newest "
            "version"
        )
    return chosen


def resolve(
    recipe: Recipe, cluster: ClusterConfig, say: Callable[[str], None], *, new_run: bool = False
) -> Recipe:
    """Returns the recipe with each reference to a version resolved to an exact one. Blocks.

    If the namespace has a run already, its versions are used; with `new_run` that is the run that
    `headrace run` would continue. Otherwise the version is looked up and its description is stored
    in the blob store. Starts the local stack for the moment if none runs. Raises UsageError if
    there is no such version.
    """
    if all(model.files is not None for model in references(recipe).values()):
        return recipe
    return asyncio.run(_resolve(recipe, cluster, say, new_run))


async def _resolve(
    recipe: Recipe, cluster: ClusterConfig, say: Callable[[str], None], new_run: bool
) -> Recipe:
    async with (
        running_stack(cluster, say) as (_, located),
        connect(located, "versions") as connection,
    ):
        recipe = await _adopt_recorded(recipe, cluster, connection, new_run)
        blobs, resolved = cluster.open_blobs(None), {}
        for name, model in references(recipe).items():
            if model.files is None:
                found = await _versions(connection, cluster, model.namespace, model.version, say)
                chosen = pick(found, model.policy, model.version)
                say(f"policy {name} starts from {chosen}")
                files = await asyncio.to_thread(store_version, chosen, blobs)
                resolved[name] = replace(model, version=chosen.published.version, files=files)
        return with_models(recipe, resolved)


async def _adopt_recorded(
    recipe: Recipe, cluster: ClusterConfig, connection: Connection, new_run: bool
) -> Recipe:
    runs = await find_runs(connection, recipe, cluster.namespace or recipe.name)
    for life in runs.values():
        if life.started is None:
            return recipe
        if life.ended is None or not new_run:
            return adopt(recipe, life.recipe())
    return recipe
