"""Connects the kit to a cluster, or starts one, and runs the trial there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from headrace.errors import UsageError
from headrace.infra import local
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import connect
from headrace.services.namespace.credentials import ADMINISTRATOR
from headrace.services.operate.conformance.conformance_report import ConformanceReport
from headrace.services.operate.conformance.trainer.trainer_trial import TrainerTrial
from headrace.trainer.contract.external_trainer import trained_elsewhere

BUILT_IN = {
    "name": "conformance",
    "policies": {"default": {"model": "tiny-llama", "training": {"external": True}}},
}
"""The recipe of the kit, if none is given."""


async def try_trainer(
    cluster: ClusterConfig,
    recipe: str | None,
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    say: Callable[[str], None],
) -> ConformanceReport:
    """Tries a trainer's command, and returns the report. `folder` gets its files.

    Raises UsageError if the recipe leaves no policy to another trainer, or leaves it several.
    """
    chosen = Recipe.model_validate(BUILT_IN) if recipe is None else read_recipe(recipe)
    policy = trained_elsewhere(chosen, None)
    if chosen.policies[policy].signers:
        raise UsageError("the kit can't check signatures: use a recipe without `signers`")
    async with _cluster(cluster, folder, say) as found, connect(found, "conformance") as connection:
        trial = TrainerTrial(
            connection, found, chosen, policy, command, folder / "runs", limit_s, say
        )
        return await trial.run()


@asynccontextmanager
async def _cluster(
    cluster: ClusterConfig, folder: Path, say: Callable[[str], None]
) -> AsyncIterator[ClusterConfig]:
    """Yields the given cluster, or a local stack of its own that ends with the trial.

    If the state folder has a secure stack that runs, yields that one, as its administrator sees it:
    no stack without passwords shall run beside it.
    """
    if cluster.bootstrap_servers is not None:
        yield cluster
        return
    running = await asyncio.to_thread(local.find, cluster.state)
    if running is not None and running.credentials is not None:
        address = running.bootstrap_servers, running.registry_url
        secure = cluster.connected(*address, running.credentials)
        yield replace(secure, role=ADMINISTRATOR)
        return
    state = folder / "stack"
    say("starting a broker and a registry")
    stack = await asyncio.to_thread(
        lambda: local.up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid())
    )
    try:
        own = replace(cluster, state=state, credentials=None, kafka_properties={})
        yield own.connected(stack.bootstrap_servers, stack.registry_url)
    finally:
        await asyncio.to_thread(local.down, state, wipe=True)
