"""The environment of the solver and the verifier, with episodes that take a random time."""

from __future__ import annotations

import asyncio
import math
import random

from examples.workflows.solver_verifier import Sums
from headrace import Observation, TaskView


class SkewedSums(Sums):
    """Waits for a log-normal time before it asks: 1 s in the median, sigma 1.

    The time follows from the task and the sample alone, so each arm of an experiment has the same
    times. It does not depend on what the policies do.
    """

    async def reset(self, task: TaskView) -> Observation:
        """Waits, and asks."""
        await asyncio.sleep(math.exp(random.Random(f"{task.number}/{task.sample}").gauss(0.0, 1.0)))
        return await super().reset(task)
