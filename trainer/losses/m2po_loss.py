"""M2PO: clips the most extreme ratios of an update until their second moment is small."""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch

LARGEST = 20.0
"""Logarithm of the largest ratio. Larger ones would only make the loss infinite."""


class M2poLoss(Loss):
    """The policy gradient on stale samples, under a bound on the second moment of the ratios.

    With r = exp(new - behaviour), take the tokens of the update that move away from the policy that
    sampled them: r > 1 with A > 0, or r < 1 with A < 0. Let t be the largest number for which the
    mean of min((log r)^2, t^2) over these tokens is at most `threshold`. Then

        low  = min(exp(-t), 1 - clip_low)
        high = max(exp(t), 1 + clip_high)
        term = - min(r * A, clip(r, low, high) * A)

    M2PO (arXiv 2510.01161). Only tokens that move away are clipped, as in the code that its authors
    published. The paper words it as a mask of the tokens with the largest (log r)^2, in whichever
    direction they move. That also takes away the gradient that leads back. The bound follows from
    the whole update, so it clips far fewer stale tokens than a fixed one if most ratios are near 1.
    t^2 is never below `threshold`: with 0.04, no ratio between 0.82 and 1.22 is clipped.

    Here t is the exact solution. The authors' code takes the largest |log r| below it, which can be
    0. That code also has `clip_low` and `clip_high`. It proposes 0.3 and 0.5, but the scripts that
    were published with it leave both off. Above 0, they give up the bound on the second moment.
    """

    threshold: float = Field(default=0.04, gt=0)
    """The largest second moment, in nats squared."""
    clip_low: float = Field(default=0.0, ge=0, le=1)
    """Ratios between 1 - `clip_low` and 1 are never clipped, whatever the second moment."""
    clip_high: float = Field(default=0.0, ge=0)
    """Ratios between 1 and 1 + `clip_high` are never clipped, whatever the second moment."""

    def prepare(self, update: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns t, a scalar. It is infinite if nothing is to be clipped."""
        log_ratio = (logprobs - update.behaviour).double()
        ascending = log_ratio[log_ratio * update.advantages > 0].square().sort().values
        numbers = torch.arange(len(ascending), device=ascending.device)
        # If the tokens from number k on had the same moment, how large might it be?
        below = ascending.cumsum(0) - ascending
        allowed = (self.threshold * len(ascending) - below) / (len(ascending) - numbers)
        too_large = allowed[ascending > allowed]
        return too_large[0].sqrt() if len(too_large) else ascending.new_tensor(torch.inf)

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        log_ratio = self.log_ratio(batch, logprobs).clamp(max=LARGEST)
        bound = min(batch.state.item(), LARGEST)
        low = min(math.exp(-bound), 1 - self.clip_low)
        high = max(math.exp(bound), 1 + self.clip_high)
        ratio = log_ratio.exp()
        return -torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)
