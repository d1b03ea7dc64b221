"""The env worker: runs environments by task, episode and attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemas.recipe import Recipe
from schemas.topics import ACTIONS, OBSERVATIONS
from services.context import ServiceContext
from services.env.handle import EnvironmentSetup
from services.env.shard import EnvShard
from services.kafka.broker import Partition
from services.plugins import load
from services.worker import CompanionStart, Worker

BUILTIN = {
    "null": "services.env.null:NullEnvironment",
    "gymnasium": "services.env.gymnasium:GymnasiumEnvironment",
}


async def run(context: ServiceContext) -> None:
    """Runs environments until `context.stopping` is set."""
    setups = load_environments(context.recipe)
    topics = context.log.topics

    def companions(place: Partition) -> Mapping[Partition, CompanionStart]:
        return {Partition(topics.name(OBSERVATIONS), place.number): "committed"}

    worker = Worker(
        context.log,
        topics=[topics.name(ACTIONS)],
        consumer_group=context.consumer_group("env"),
        make_shard=lambda shard: EnvShard(shard, setups, context.worker_id),
        companions=companions,
        stopping=context.stopping,
    )
    try:
        await worker.run()
    finally:
        await asyncio.gather(*(setup.close_pool() for setup in setups.values()))


def load_environments(recipe: Recipe) -> dict[str, EnvironmentSetup]:
    """The recipe's environments by key. UsageError where one can't be loaded."""
    return {
        key: EnvironmentSetup(
            load("environment", environment.use, BUILTIN),
            environment.options,
            asyncio.Semaphore(environment.slots),
        )
        for key, environment in recipe.environments.items()
    }
