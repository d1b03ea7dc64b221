"""The agent worker: runs thousands of durable episodes in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.topics import EPISODES, GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS, Topic
from headrace.services.agent.agents import load_agents
from headrace.services.agent.crash_isolation.episode_process import EpisodesProcess
from headrace.services.agent.crash_isolation.isolation import Isolation, MakeChild
from headrace.services.agent.gateway.clients import ClientAgent
from headrace.services.agent.gateway.program import Command
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.agent.shard import AgentShard
from headrace.services.base.concurrency import until_first
from headrace.services.kafka.broker import Partition
from headrace.services.tasks.admission import refusal
from headrace.services.tasks.cancellation import Cancellations
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.worker import Worker

SIDE_TOPICS: tuple[Topic[Any], ...] = (GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS)


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
    agents = load_agents(context.recipe)
    for key, setup in agents.items():
        if isinstance(setup.agent, ClientAgent):
            if entrance is None:
                raise UsageError(
                    f"agents.{key} waits for clients, which this worker can't serve: run "
                    "`headrace serve gateway` instead of `headrace serve agent`"
                )
            setup.agent.entrance = entrance
        elif isinstance(setup.agent, Command):
            await setup.agent.open(context.recipe.tasks.deadline_s)
    cancellations = Cancellations(context.log)
    isolation = Isolation(make_child or partial(EpisodesProcess.start, context.recipe))
    side_topics = [context.log.topics.name(topic) for topic in SIDE_TOPICS]
    worker = Worker(
        context.log,
        topics=[context.log.topics.name(EPISODES)],
        consumer_group=context.consumer_group("agent"),
        make_shard=lambda shard: AgentShard(
            shard,
            agents,
            partial(refusal, context.recipe),
            context.ending,
            isolation,
            cancellations,
        ),
        side_partitions=lambda main: {
            Partition(topic, main.number): "committed" for topic in side_topics
        },
        count_deaths=True,
        stopping=context.stopping,
    )
    try:
        await until_first(cancellations.follow(), worker.run())
    finally:
        for setup in agents.values():
            if isinstance(setup.agent, Command):
                await setup.agent.aclose()
