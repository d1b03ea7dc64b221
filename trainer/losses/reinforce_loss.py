"""REINFORCE with truncated importance sampling."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch


class ReinforceLoss(Loss):
    """The policy gradient, with truncated importance weights and without any clip.

    With w = min(exp(new - behaviour), cap), which has no gradient:

        term = - w * A * new

    REINFORCE (Williams 1992), with the truncation of importance weights of Ionides (2008). With the
    advantage `rloo` it is RLOO (arXiv 2402.14740) for stale samples.
    """

    importance_cap: float = Field(default=2.0, gt=0)
    """The largest importance weight w."""

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        weights = (logprobs.detach() - batch.behaviour).exp().clamp(max=self.importance_cap)
        return -weights * batch.advantages * logprobs
