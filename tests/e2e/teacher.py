"""An agent that knows the way across the frozen lake."""

from __future__ import annotations

from headrace.services.agent.episode import Episode

WAY = "DDRRDR"


async def agent(episode: Episode) -> None:
    """Goes it, and says so in the policy's place."""
    observation = await episode.reset()
    for step in WAY:
        generation = await episode.generate(observation.text, demonstration=step)
        observation = await episode.step(generation.text)
