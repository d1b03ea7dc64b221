"""IcePop: GRPO whose importance weights are masked instead of truncated."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.grpo_loss import clipped_terms
from headrace.trainer.losses.loss import Loss, MicroBatch


class IcepopLoss(Loss):
    """PPO's clipped surrogate, without the tokens on which engine and trainer disagree.

    With r = exp(new - proximal) and k = exp(proximal - behaviour):

        term = - M(k) * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
        M(k) = k if mask_low <= k <= mask_high, else 0

    Masked importance sampling: IcePop (Ling Team 2025, "Every Step Evolves", arXiv 2510.18855). A
    weight that is far from 1 in either direction is more often an error of the engine than
    information, so its token is left out, where `grpo` keeps it with a truncated weight.
    """

    clip_low: float = Field(default=0.2, gt=0)
    """The ratio r is clipped from below to 1 - `clip_low`."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio r is clipped from above to 1 + `clip_high`."""
    mask_low: float = Field(default=0.5, ge=0, le=1)
    """A token with a smaller k is left out."""
    mask_high: float = Field(default=5.0, ge=1)
    """A token with a larger k is left out."""

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        weights = (batch.proximal - batch.behaviour).exp()
        weights = torch.where(self._kept(batch), weights, 0.0)
        ratio = (logprobs - batch.proximal).exp()
        return weights * clipped_terms(ratio, batch.advantages, self.clip_low, self.clip_high)

    def log_ratio(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the logarithm of k if the token is masked, and that of r otherwise, [N]."""
        lag = batch.proximal - batch.behaviour
        return torch.where(self._kept(batch), logprobs - batch.proximal, lag)

    def _kept(self, batch: MicroBatch) -> Tensor:
        weights = (batch.proximal - batch.behaviour).exp()
        return (weights >= self.mask_low) & (weights <= self.mask_high)
