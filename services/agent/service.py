"""The agent worker: runs thousands of durable episodes in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import LoadReported
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    EPISODES,
    GENERATIONS,
    LOADS,
    OBSERVATIONS,
    OUTCOMES,
    RESULTS,
    Topic,
)
from headrace.services.agent.agents import load_agents
from headrace.services.agent.crash_isolation.contained_tasks import contain_exits
from headrace.services.agent.crash_isolation.episode_process import EpisodesProcess
from headrace.services.agent.crash_isolation.isolation import Isolation, MakeChild
from headrace.services.agent.gateway.clients import ClientAgent
from headrace.services.agent.gateway.program import Command
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.agent.memory.unread_answers import AnswerReader
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.routing.action_routes import ActionRoutes
from headrace.services.agent.routing.prompt_routes import PromptRoutes
from headrace.services.agent.shard import AgentShard
from headrace.services.base.concurrency import until_first, use_threads
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import Back, follow_events
from headrace.services.tasks.admission import refusal
from headrace.services.tasks.cancellation import Cancellations
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.worker import Worker

SIDE_TOPICS: tuple[Topic[Any], ...] = (GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS)
MOST_THREADS = 256
"""Most threads in which `asyncio.to_thread` runs the calls of all agents of a worker."""


async def run(
    context: ServiceContext,
    make_child: MakeChild | None = None,
    entrance: GatewayServer | None = None,
) -> None:
    """Runs episodes until `context.stopping` is set.

    `make_child` starts the child of isolated episodes; by default the child is a process. Clients
    come in through `entrance`. Raises UsageError if the recipe has an agent `client`, but there is
    no entrance, or if this host can't run an agent's containers, and DependencyError if the Docker
    engine that should run them can't be reached.
    """
    use_threads(MOST_THREADS)
    contain_exits()
    agents = load_agents(context.recipe)
    await _open(agents, context.recipe, entrance)
    context.log.broker.prepare_sends(gathered=True)
    cancellations = Cancellations(context.log)
    episodes = context.log.topics.name(EPISODES)

    def agent_workers() -> float:
        """Each agent worker has about as many partitions of `episodes` as any other."""
        return context.recipe.partitions / max(1, len(worker.numbers(episodes)))

    routes = PromptRoutes(context.recipe.policies, context.recipe.pool_partitions, agent_workers)
    action_routes = ActionRoutes(
        [key for key, one in context.recipe.environments.items() if not one.external],
        context.log.topics.action_partitions,
        agent_workers,
    )
    isolation = Isolation(make_child or partial(EpisodesProcess.start, context.recipe))
    reader = AnswerReader(context.log)
    what_shards_share = (
        *(partial(refusal, context.recipe), context.ending, isolation, cancellations),
        *(routes, action_routes, reader),
    )
    side_topics = [context.log.topics.name(topic) for topic in SIDE_TOPICS]
    worker = Worker(
        context.log,
        topics=[episodes],
        consumer_group=context.consumer_group("agent"),
        make_shard=lambda shard: AgentShard(shard, agents, *what_shards_share),
        side_partitions=lambda main: {
            Partition(topic, main.number): "committed" for topic in side_topics
        },
        count_deaths=True,
        stopping=context.stopping,
    )
    try:
        loads = follow_loads(context.log, (routes, action_routes))
        await until_first(
            cancellations.follow(), loads, reader.run(), isolation.run(), worker.run()
        )
    finally:
        for setup in agents.values():
            if isinstance(setup.agent, Command):
                await setup.agent.aclose()


async def _open(
    agents: Mapping[str, AgentSetup], recipe: Recipe, entrance: GatewayServer | None
) -> None:
    """Gives agents what they need of this worker."""
    for key, setup in agents.items():
        if isinstance(setup.agent, ClientAgent):
            if entrance is None:
                raise UsageError(
                    f"agents.{key} waits for clients, which this worker can't serve: run "
                    "`headrace serve gateway` instead of `headrace serve agent`"
                )
            setup.agent.entrance = entrance
        elif isinstance(setup.agent, Command):
            await setup.agent.open(recipe.tasks.deadline_s)


async def follow_loads(log: EventLog, followers: Sequence[PromptRoutes | ActionRoutes]) -> None:
    """Passes on the reports of inference and env workers, as they come.

    Raises DependencyError if the broker does not answer.
    """
    loop = asyncio.get_running_loop()
    async with aclosing(follow_events(log, {log.topics.partition(LOADS): Back(0)})) as items:
        async for item in items:
            if isinstance(item, Delivery) and isinstance(item.event, LoadReported):
                for routes in followers:
                    routes.on_report(item.event, loop.time())
