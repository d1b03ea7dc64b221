"""M2PO: masks the most extreme tokens of an update until the second moment is small."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch


class M2poLoss(Loss):
    """The policy gradient on stale samples, under a bound on the second moment of the ratios.

    With r = exp(new - behaviour), the tokens with the largest (log r)^2 of the update are masked,
    one after the other, until the mean of (log r)^2 over the others is at most `threshold`. M is 0
    for a masked token and 1 for any other:

        term = - M * r * A

    M2PO (arXiv 2510.01161), with the paper's threshold. It bounds the variance of the importance
    weights of the whole update and not each ratio, so it masks far fewer stale tokens than a clip.
    Masked tokens still count in the mean over tokens.
    """

    threshold: float = Field(default=0.04, gt=0)
    """The largest mean of (log r)^2 over the tokens that are not masked."""

    def prepare(self, update: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns M for each sampled token of the update, [T] bool."""
        moments = (logprobs - update.behaviour).double().square()
        ascending, order = moments.sort(stable=True)
        counts = torch.arange(1, len(moments) + 1, device=moments.device)
        # The running mean of ascending values ascends, so the kept tokens are the first ones.
        kept = ascending.cumsum(0) <= self.threshold * counts
        return torch.zeros_like(kept).scatter(0, order, kept)

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        kept: Tensor = batch.state[batch.tokens]
        # A masked ratio may be infinite, and 0 times infinity is not a number.
        log_ratio = torch.where(kept, logprobs - batch.behaviour, 0.0)
        return -(kept * log_ratio.exp() * batch.advantages)
