"""The built-in agents, and loading of the agents that a recipe names.

An agent of your own is a coroutine function like these. The recipe names it by import path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.records import AgentSetup
from headrace.services.agent.teacher_scores import Teacher
from headrace.services.base.plugins import load
from headrace.services.base.reveal import reveal
from headrace.services.models.tokens import tokenizer_digest
from headrace.services.models.weights import model_folder
from headrace.services.tasks.teachers import check_teachers


async def single_turn(episode: Episode) -> None:
    """Asks the policy once, and gives its answer to the environment."""
    observation = await episode.reset()
    generation = await episode.generate(observation.text)
    await episode.step(generation.text)


async def multi_turn(episode: Episode) -> None:
    """Gives observations to the policy, and its answers to the environment, until that is done."""
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text)
        observation = await episode.step(generation.text)


@dataclass(frozen=True)
class ChatOptions:
    """The options of the agent `chat`. A task's own options override those of the recipe."""

    system: str = ""
    """The text of the system message. Empty: the conversation has none."""


async def chat(episode: Episode) -> None:
    """Does the same as `multi_turn`, in messages of the model's own chat template.

    Observations are messages of the user.
    """
    observation = await episode.reset()
    system = str(episode.task.options.get("system", ChatOptions.system))
    messages = [{"role": "system", "content": system}] if system else []
    while not observation.done:
        messages.append({"role": "user", "content": observation.text})
        generation = await episode.chat(messages)
        observation = await episode.step(generation.text)
        messages = []


BUILTIN = {
    "single_turn": single_turn,
    "multi_turn": multi_turn,
    "chat": chat,
    "client": "headrace.services.agent.gateway.clients:ClientAgent",
    "command": "headrace.services.agent.gateway.program:Command",
}
OPTIONS = {"chat": ChatOptions}
"""The options of built-in agents that are functions. A class has its options as fields."""


def load_agents(recipe: Recipe) -> dict[str, AgentSetup]:
    """Returns the recipe's agents by key.

    Raises UsageError if one can't be loaded, or if a policy's teacher can't score what it samples.
    """
    check_teachers(recipe)
    tokenizers = {
        name: tokenizer_digest(model_folder(policy.model))
        for name, policy in recipe.policies.items()
    }
    score_s = {
        name: environment.score_s
        for name, environment in recipe.environments.items()
        if environment.score_s is not None
    }
    teachers = {
        name: Teacher(policy.training.teacher, policy.training.teacher_s)
        for name, policy in recipe.policies.items()
        if policy.training is not None and policy.training.teacher is not None
    }
    untrained = {name for name, policy in recipe.policies.items() if policy.training is None}
    setups = {}
    for key, settings in recipe.agents.items():
        agent = load("agent", settings.use, BUILTIN)
        options = reveal(settings.options, f"agents.{key}.options")
        if isinstance(agent, type):
            agent, options = _make(key, agent, options), {}
        setups[key] = AgentSetup(agent, options, settings, tokenizers, score_s, untrained, teachers)
    return setups


def _make(key: str, agent: Any, options: Mapping[str, Any]) -> Agent:
    """Makes an agent that is a class. Raises UsageError if the class doesn't take the options."""
    try:
        made: Agent = agent(**options)
    except TypeError as error:
        raise UsageError(f"agents.{key}.options: {error}") from error
    return made
