"""The null environment: it rewards the last step, and can wait in each call."""

from __future__ import annotations

import asyncio

from headrace.services.base.types import Observation, TaskView


class NullEnvironment:
    """Ends after `turns` steps with reward 1. For benchmarks, and to try out a deployment."""

    replayable = True

    def __init__(self, turns: int = 4, delay_ms: float = 0.0) -> None:
        """Makes an environment that counts.

        Options:
            turns: Number of steps of an episode.
            delay_ms: Milliseconds that each reset and each step takes.
        """
        self._turns = turns
        self._delay_s = delay_ms / 1000
        self._step = 0

    async def reset(self, task: TaskView) -> Observation:
        """Start counting steps."""
        self._step = 0
        await self._wait()
        return Observation(text="0")

    async def step(self, action: str) -> Observation:
        """Count a step, whatever the action."""
        self._step += 1
        await self._wait()
        done = self._step >= self._turns
        return Observation(text=str(self._step), reward=1.0 if done else 0.0, terminated=done)

    async def aclose(self) -> None:
        """Do nothing: it holds nothing."""

    async def _wait(self) -> None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
