"""The built-in agents. An agent of your own is a coroutine like these, named in the recipe."""

from __future__ import annotations

from typing import Any

from headrace.services.agent.episode import Episode
from headrace.services.base.plugins import Loader


def _calculator_teacher() -> Any:
    from headrace.services.agent.teacher import calculator_teacher

    return calculator_teacher


def _client() -> Any:
    from headrace.services.agent.gateway.clients import Client

    return Client


def _command() -> Any:
    from headrace.services.agent.gateway.program import Command

    return Command


BUILTIN: dict[str, Loader] = {
    "single_turn": lambda: single_turn,
    "multi_turn": lambda: multi_turn,
    "chat": lambda: chat,
    "calculator_teacher": _calculator_teacher,
    "client": _client,
    "command": _command,
}


async def single_turn(episode: Episode) -> None:
    """One question, one answer, which the environment judges."""
    observation = await episode.reset()
    generation = await episode.generate(observation.text)
    await episode.step(generation.text)


async def multi_turn(episode: Episode) -> None:
    """Observation and answer in turn, in one growing context, until the environment is done."""
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text)
        observation = await episode.step(generation.text)


async def chat(episode: Episode) -> None:
    """As `multi_turn`, in messages of the model's own chat template.

    Observations are the user's. The option `system` is what the system's message says.
    """
    observation = await episode.reset()
    system = str(episode.task.options.get("system", ""))
    messages = [{"role": "system", "content": system}] if system else []
    while not observation.done:
        messages.append({"role": "user", "content": observation.text})
        generation = await episode.chat(messages)
        observation = await episode.step(generation.text)
        messages = []
