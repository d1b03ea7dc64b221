"""An agent that asks the policy once, and then runs the same command whatever it answered."""

from __future__ import annotations

from headrace.services.agent.episode import Episode

COMMAND = "mkdir out; tr a-z A-Z < in/text > out/text; cat /etc/which >> out/text 2>/dev/null"


async def change(episode: Episode) -> None:
    """Changes the file `in/text`. It never ends the environment itself."""
    observation = await episode.reset()
    await episode.generate(observation.text or "go")
    await episode.step(COMMAND)
    episode.reward = 1.0
