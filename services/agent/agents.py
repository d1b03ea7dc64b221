"""The built-in agents. An agent of your own is a coroutine like these, named in the recipe."""

from __future__ import annotations

from headrace.services.agent.episode import Episode

BUILTIN = {
    "single_turn": "headrace.services.agent.agents:single_turn",
    "multi_turn": "headrace.services.agent.agents:multi_turn",
    "chat": "headrace.services.agent.agents:chat",
    "calculator_teacher": "headrace.services.agent.teacher:calculator_teacher",
    "client": "headrace.services.agent.gateway.clients:Client",
    "command": "headrace.services.agent.gateway.program:Command",
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
