"""GRPO with DAPO's two clip bounds and truncated importance weights."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch


class GrpoLoss(Loss):
    """PPO's clipped surrogate with truncated importance weights.

    With A the advantage, r = exp(new - proximal) and w = min(exp(proximal - behaviour), cap):

        term = - w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    - The clipped surrogate is equation 7 of PPO (arXiv 1707.06347). GRPO (DeepSeekMath,
      arXiv 2402.03300) uses it with group-relative advantages. It takes the mean of each sequence
      first: set `reduction = "sequence"` for GRPO as published.
    - Two clip bounds and the mean over all tokens, which is the default here, are DAPO's
      (arXiv 2503.14476, sections 3.1 and 3.3).
    - w has no gradient. It is truncated importance sampling (Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"). It corrects for stale samples and
      for numerical differences between engine and trainer.
    - The clip bounds how far a batch's later updates move from its first one. With one minibatch
      and one epoch r is 1, and nothing is clipped: `clip_low` and `clip_high` have no effect.
    """

    clip_low: float = Field(default=0.2, gt=0)
    """The ratio r is clipped from below to 1 - `clip_low`."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio r is clipped from above to 1 + `clip_high`."""
    importance_cap: float = Field(default=2.0, gt=0)
    """The largest importance weight w."""

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        weights = (batch.proximal - batch.behaviour).exp().clamp(max=self.importance_cap)
        ratio = self.log_ratio(batch, logprobs).exp()
        return weights * clipped_terms(ratio, batch.advantages, self.clip_low, self.clip_high)

    def log_ratio(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns new - proximal, [N]."""
        return logprobs - batch.proximal


def clipped_terms(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Returns - min(r A, clip(r, 1 - low, 1 + high) A), [N]: PPO (arXiv 1707.06347), equation 7."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantages, clipped * advantages)
