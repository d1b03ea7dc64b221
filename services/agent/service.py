"""The agent worker: thousands of durable episodes in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from schemas.recipe import Recipe
from schemas.topics import EPISODES, GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS, Topic
from services.agent.agents import BUILTIN
from services.agent.cancellations import Cancellations
from services.agent.child_process import ChildProcess
from services.agent.isolation import Isolation, MakeChild
from services.agent.records import AgentSetup
from services.agent.shard import AgentShard
from services.concurrency import until_first
from services.context import ServiceContext
from services.kafka.broker import Partition
from services.plugins import load
from services.refusal import refusal
from services.tokens import tokenizer_digest
from services.weights import model_folder
from services.worker import CompanionStart, Worker

COMPANIONS: tuple[Topic[Any], ...] = (GENERATIONS, OBSERVATIONS, OUTCOMES, RESULTS)


async def run(context: ServiceContext, make_child: MakeChild | None = None) -> None:
    """Runs episodes until `context.stopping` is set.

    `make_child` starts a child for episodes that may kill; None makes it a process.
    """
    agents = load_agents(context.recipe)
    cancellations = Cancellations(context.log)
    isolation = Isolation(make_child or partial(ChildProcess.start, context.recipe))
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
    return {
        key: AgentSetup(
            load("agent", agent.use, BUILTIN),
            agent.options,
            agent.unfinished_reward,
            tokenizers,
            score_s,
        )
        for key, agent in recipe.agents.items()
    }
