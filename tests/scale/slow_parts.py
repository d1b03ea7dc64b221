"""An engine and a loss that take as long as larger ones, for the real run in two regions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from random import Random

from torch import Tensor

from headrace.services.inference.engine import EngineOutput, EnginePrompt, EngineSetup
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.trainer.losses.grpo_loss import clipped_terms
from headrace.trainer.losses.loss import Loss, MicroBatch

GENERATION_S, SIGMA = 10.0, 0.4
"""Median time of a generation, and the standard deviation of its logarithm."""
TRAIN_S = 5.0
"""Of each batch, in which all sequences fit into one micro-batch."""


class LongGenerations(ScriptedEngine):
    """Answers after a random time."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._chance = Random()

    async def generate(self, prompt: EnginePrompt) -> EngineOutput:
        await asyncio.sleep(GENERATION_S * math.exp(SIGMA * self._chance.gauss(0.0, 1.0)))
        return await super().generate(prompt)


class LongTraining(Loss):
    """GRPO that takes TRAIN_S for a micro-batch."""

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns what `grpo` does."""
        time.sleep(TRAIN_S)
        return clipped_terms((logprobs - batch.proximal).exp(), batch.advantages, 0.2, 0.2)


def alternating(rewards: Sequence[float]) -> list[float]:
    """Advantages with which the weights change, although all rewards are equal."""
    return [1.0 if index % 2 else -1.0 for index in range(len(rewards))]
