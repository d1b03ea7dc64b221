"""The env worker: runs the environments of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from headrace.schemas import packed
from headrace.schemas.events import EnvironmentLoad
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ACTIONS
from headrace.services.base.concurrency import until_first, use_threads
from headrace.services.base.plugins import load
from headrace.services.base.reveal import reveal
from headrace.services.env.instances import Instances
from headrace.services.env.libraries.libraries_child import LIBRARIES
from headrace.services.env.libraries.libraries_setup import LibrarySetup
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.sandbox.submitted_tasks import expect_submitted
from headrace.services.env.setup import EnvironmentSetup, Opening, Setup
from headrace.services.env.shard import EnvShard
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.tasks.artifact_store import ArtifactStore
from headrace.services.worker.load_reports import LoadReports
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.worker import Worker

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


SPARE_THREADS = 32
"""How many more threads than slots `asyncio.to_thread` has: for the worker's own calls, and for
calls of environments that hang, because a thread can't be cancelled."""
WATCH_S = 10.0
"""Seconds between two looks for slots that are stuck."""


async def run(context: ServiceContext) -> None:
    """Run environments until `context.stopping` is set. The worker joins its group once ready."""
    instances = Instances(context.log.send, context.worker_id)
    store = ArtifactStore(context.blobs, context.recipe.artifacts)
    setups = load_environments(context.recipe, context.namespace, instances, store)
    use_threads(sum(setup.slots.most for setup in setups.values()) + SPARE_THREADS)
    external = {key for key, one in context.recipe.environments.items() if one.external}
    bounds = {key: one.step_s for key, one in context.recipe.environments.items()}
    step_s = {key: bound for key, bound in bounds.items() if bound is not None}
    topics = context.log.topics
    actions = topics.name(ACTIONS)
    worker = Worker(
        context.log,
        topics=[actions],
        consumer_group=context.consumer_group("env"),
        make_shard=lambda shard: EnvShard(shard, setups, context.worker_id, external, step_s),
        stopping=context.stopping,
        changed=lambda: reports.soon(),
    )
    measure = partial(measure_load, setups, worker, actions)
    reports = LoadReports(context.log.send, context.worker_id, measure)

    async def work() -> None:
        await until_first(worker.run(), reports.run(context.stopping), watch_slots(setups))

    opening = [setup for setup in setups.values() if isinstance(setup, Opening)]
    try:
        if opening:
            async with instances.reporting():
                await asyncio.gather(*(setup.open() for setup in opening))
                instances.enter(context.worker_id, "worker", "ready")
                await until_first(work(), expect_submitted(context.log, setups))
        else:
            await work()
    finally:
        await asyncio.gather(*(setup.close_pool() for setup in setups.values()))


async def watch_slots(setups: Mapping[str, Setup]) -> None:
    """Looks for slots that are stuck. Raises HeadraceError if an environment has too many."""
    while True:
        await asyncio.sleep(WATCH_S)
        for key, setup in setups.items():
            setup.slots.require_free(key)


def measure_load(
    setups: Mapping[str, Setup], worker: Worker, actions: str
) -> list[EnvironmentLoad]:
    """Returns what the worker can do for each environment now, and what waits for it.

    `actions` is the name of the topic of actions.
    """
    partitions = packed.pack_i32(worker.numbers(actions))
    unhandled = worker.unhandled(actions)
    return [
        EnvironmentLoad(
            environment=key,
            partitions=partitions,
            slots=setup.slots.most,
            busy=setup.slots.busy,
            waiting=setup.slots.waiting + unhandled,
            run_ms=int(1000 * setup.slots.run_s.value),
            open_ms=int(1000 * setup.slots.open_s.value),
        )
        for key, setup in setups.items()
    ]


def load_environments(
    recipe: Recipe, namespace: str, instances: Instances, store: ArtifactStore | None = None
) -> dict[str, Setup]:
    """Load the recipe's environments that this worker runs, by key.

    Without `store`, no files go in or come out.

    Raises UsageError if one can't be loaded.
    """
    setups: dict[str, Setup] = {}
    for key, environment in recipe.environments.items():
        if environment.external:
            continue
        options = reveal(environment.options, f"environments.{key}.options")
        slots = EnvironmentSlots(environment.slots)
        slots.export(key)
        if environment.use == DOCKER:
            ahead = 2 * environment.slots
            docker = DockerSetup(
                key, options, slots, namespace, instances, ahead=ahead, store=store
            )
            docker.ceilings.require_deadline(recipe.tasks.deadline_s, f"environments.{key}")
            setups[key] = docker
        elif environment.use in LIBRARIES:
            setups[key] = LibrarySetup(environment.use, options, slots, store)
        else:
            builtin = {**BUILTIN, **LIBRARIES}
            make = load("environment", environment.use, builtin)
            setups[key] = EnvironmentSetup(make, options, slots, namespace, store=store)
    return setups
