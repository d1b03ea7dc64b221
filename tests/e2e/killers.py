"""An agent that kills its whole process for some tasks."""

from __future__ import annotations

import os
import signal

from headrace.services.agent.episode import Episode


async def agent(episode: Episode) -> None:
    """As `multi_turn`; the options `exits` and `is_killed` number the tasks that kill."""
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text)
        if episode.task.number == episode.task.options["exits"]:
            os._exit(1)
        if episode.task.number == episode.task.options["is_killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        observation = await episode.step(generation.text)
