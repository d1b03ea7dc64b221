"""The agent worker: thousands of durable episodes in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from schemas.recipe import Recipe
from schemas.topics import EPISODES, GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS, Topic
from services.agent.agents import BUILTIN
from services.agent.cancellations import Cancellations
from services.agent.child_process import EpisodesProcess
from services.agent.episode import Agent
from services.agent.gateway.clients import Client, Entrance
from services.agent.isolation import Isolation, MakeChild
from services.agent.records import AgentSetup
from services.agent.shard import AgentShard
from services.concurrency import until_first
from services.context import ServiceContext
from services.errors import UsageError
from services.kafka.broker import Partition
from services.plugins import load
from services.refusal import refusal
from services.tokens import tokenizer_digest
from services.weights import model_folder
from services.worker import CompanionStart, Worker

COMPANIONS: tuple[Topic[Any], ...] = (GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS)


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
    isolation = Isolation(make_child or partial(EpisodesProcess.start, context.recipe))
    topics = context.log.topics

    answers = [topics.name(topic) for topic in COMPANIONS]

    def companions(place: Partition) -> Mapping[Partition, CompanionStart]:
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
        companions=companions,
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
