"""Agents that end their process, for children to run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from headrace.services.agent.episode import Episode


async def killer(episode: Episode) -> None:
    """Plays as told: `how` in the task's payload."""
    observation = await episode.reset()
    how = episode.task.payload.get("how", "")
    await episode.generate(observation.text)
    if how == "exit":
        os._exit(7)
    elif how == "kill":
        os.killpg(0, signal.SIGKILL)
    elif how == "close":
        os.closerange(3, 256)
    elif how == "sys.exit":
        sys.exit(7)
    elif how == "wait":
        await asyncio.Event().wait()
    await episode.step("a")
