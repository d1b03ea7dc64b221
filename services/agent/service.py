"""The agent worker: thousands of durable episodes in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import EPISODES, GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS, Topic
from headrace.services.agent.agents import BUILTIN
from headrace.services.agent.crash_isolation.episode_process import ChildProcess
from headrace.services.agent.crash_isolation.isolation import Isolation, MakeChild
from headrace.services.agent.episode import Agent
from headrace.services.agent.gateway.clients import Client, Entrance
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.shard import AgentShard
from headrace.services.base.concurrency import until_first
from headrace.services.base.plugins import load
from headrace.services.kafka.broker import Partition
from headrace.services.models.tokens import tokenizer_digest
from headrace.services.models.weights import model_folder
from headrace.services.tasks.admission import refusal
from headrace.services.tasks.cancellation import Cancellations
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.worker import SideStart, Worker

SIDE_TOPICS: tuple[Topic[Any], ...] = (GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS)


async def run(
    context: ServiceContext,
    make_child: MakeChild | None = None,
    entrance: Entrance | None = None,
) -> None:
    """Runs episodes until `context.stopping` is set.

    `make_child` starts a child for episodes that may kill; None makes it a process. Clients come in
    by `entrance`. UsageError where an agent waits for clients and there is none.
    """
    agents = load_agents(context.recipe)
    for key, setup in agents.items():
        if isinstance(setup.agent, Client):
            if entrance is None:
                raise UsageError(
                    f"agents.{key} waits for clients: run `headrace serve gateway` in place of "
                    "`headrace serve agent`"
                )
            setup.agent.entrance = entrance
    cancellations = Cancellations(context.log)
    isolation = Isolation(make_child or partial(ChildProcess.start, context.recipe))
    topics = context.log.topics

    answers = [topics.name(topic) for topic in SIDE_TOPICS]

    def side_partitions(place: Partition) -> Mapping[Partition, SideStart]:
        return {Partition(name, place.number): "committed" for name in answers}

    worker = Worker(
        context.log,
        topics=[topics.name(EPISODES)],
        consumer_group=context.consumer_group("agent"),
        make_shard=lambda shard: AgentShard(
            shard,
            agents,
            partial(refusal, context.recipe),
            context.ending,
            isolation,
            cancellations,
        ),
        side_partitions=side_partitions,
        count_deaths=True,
        stopping=context.stopping,
    )
    await until_first(cancellations.follow(), worker.run())


def load_agents(recipe: Recipe) -> dict[str, AgentSetup]:
    """The recipe's agents by key. UsageError where one can't be loaded."""
    tokenizers = {
        name: tokenizer_digest(model_folder(policy.model))
        for name, policy in recipe.policies.items()
    }
    score_s = {
        name: environment.score_s
        for name, environment in recipe.environments.items()
        if environment.score_s is not None
    }
    setups = {}
    for key, agent in recipe.agents.items():
        coroutine, options = load("agent", agent.use, BUILTIN), agent.options
        if isinstance(coroutine, type):
            coroutine, options = _make(key, coroutine, options), {}
        setups[key] = AgentSetup(coroutine, options, agent.unfinished_reward, tokenizers, score_s)
    return setups


def _make(key: str, agent: Any, options: Mapping[str, Any]) -> Agent:
    """An agent that is a class. UsageError where it does not take these options."""
    try:
        made: Agent = agent(**options)
    except TypeError as error:
        raise UsageError(f"agents.{key}.options: {error}") from error
    return made
