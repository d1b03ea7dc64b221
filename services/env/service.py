"""The env worker: runs the environments of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ACTIONS, OBSERVATIONS
from headrace.services.base.plugins import load
from headrace.services.base.reveal import reveal
from headrace.services.env.instances import Instances
from headrace.services.env.libraries.libraries_child import LIBRARIES
from headrace.services.env.libraries.libraries_setup import LibrarySetup
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.setup import EnvironmentSetup, Opening, Setup
from headrace.services.env.shard import EnvShard
from headrace.services.kafka.broker import Partition
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.worker import SideStart, Worker

DOCKER = "docker"
"""The environment whose episodes have containers: it has a setup of its own."""
BUILTIN = {
    "null": "headrace.services.env.null:NullEnvironment",
    "question": "headrace.services.env.question_environment:QuestionEnvironment",
    "gymnasium": "headrace.services.env.gymnasium_environment:GymnasiumEnvironment",
    "http": "headrace.services.env.http_environment:HttpEnvironment",
    "openenv": "headrace.services.env.openenv.openenv_environment:OpenEnvEnvironment",
    "mcp": "headrace.services.env.mcp.mcp_environment:McpEnvironment",
    DOCKER: "headrace.services.env.sandbox.pool:DockerSetup",
}


async def run(context: ServiceContext) -> None:
    """Run environments until `context.stopping` is set. The worker joins its group once ready."""
    instances = Instances(context.log.send, context.worker_id)
    setups = load_environments(context.recipe, context.namespace, instances)
    external = {key for key, one in context.recipe.environments.items() if one.external}
    bounds = {key: one.step_s for key, one in context.recipe.environments.items()}
    step_s = {key: bound for key, bound in bounds.items() if bound is not None}
    topics = context.log.topics

    def side_partitions(partition: Partition) -> Mapping[Partition, SideStart]:
        return {Partition(topics.name(OBSERVATIONS), partition.number): "committed"}

    worker = Worker(
        context.log,
        topics=[topics.name(ACTIONS)],
        consumer_group=context.consumer_group("env"),
        make_shard=lambda shard: EnvShard(shard, setups, context.worker_id, external, step_s),
        side_partitions=side_partitions,
        stopping=context.stopping,
    )
    opening = [setup for setup in setups.values() if isinstance(setup, Opening)]
    try:
        if opening:
            async with instances.reporting():
                await asyncio.gather(*(setup.open() for setup in opening))
                instances.enter(context.worker_id, "worker", "ready")
                await worker.run()
        else:
            await worker.run()
    finally:
        await asyncio.gather(*(setup.close_pool() for setup in setups.values()))


def load_environments(recipe: Recipe, namespace: str, instances: Instances) -> dict[str, Setup]:
    """Load the recipe's environments that this worker runs, by key.

    Raises UsageError if one can't be loaded.
    """
    setups: dict[str, Setup] = {}
    for key, environment in recipe.environments.items():
        if environment.external:
            continue
        options = reveal(environment.options, f"environments.{key}.options")
        slots = asyncio.Semaphore(environment.slots)
        if environment.use == DOCKER:
            docker = DockerSetup(key, options, slots, namespace, instances)
            docker.ceilings.require_deadline(recipe.tasks.deadline_s, f"environments.{key}")
            setups[key] = docker
        elif environment.use in LIBRARIES:
            setups[key] = LibrarySetup(environment.use, options, slots)
        else:
            builtin = {**BUILTIN, **LIBRARIES}
            make = load("environment", environment.use, builtin)
            setups[key] = EnvironmentSetup(make, options, slots, namespace)
    return setups
