"""FrozenLake whose episodes take a random time, a few of them far longer than most."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from headrace import Observation, TaskView
from headrace.services.env.gymnasium_environment import GymnasiumEnvironment


class SkewedLake(GymnasiumEnvironment):
    """A Gymnasium environment that first waits for a log-normal time.

    The time follows from the task and the sample alone, so each arm of an experiment has the same
    times. It does not depend on what the policy does.
    """

    def __init__(self, median_s: float = 1.0, sigma: float = 1.0, **options: Any) -> None:
        """The other options are those of the environment `gymnasium`.

        Options:
            median_s: Median of the time of an episode, in seconds.
            sigma: Standard deviation of the time's logarithm.
        """
        super().__init__(**options)
        self._median_s = median_s
        self._sigma = sigma

    async def reset(self, task: TaskView) -> Observation:
        """Wait, and reset."""
        draw = random.Random(f"{task.number}/{task.sample}").gauss(0.0, self._sigma)
        await asyncio.sleep(self._median_s * math.exp(draw))
        return await super().reset(task)
