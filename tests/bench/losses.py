"""Losses that algorithms are compared with."""

from __future__ import annotations

from torch import Tensor

from headrace.trainer.losses.grpo_loss import clipped_terms
from headrace.trainer.losses.loss import Loss, MicroBatch


class BehaviourClip(Loss):
    """PPO's clip of new / behaviour: GRPO as M2PO's paper compares with it.

    The built-in `grpo` clips new / proximal, and corrects for staleness by a weight.
    """

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns - min(r A, clip(r, 0.8, 1.2) A) with r = exp(new - behaviour), [N]."""
        return clipped_terms((logprobs - batch.behaviour).exp(), batch.advantages, 0.2, 0.2)
