"""GSPO: one ratio for each sequence."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.grpo_loss import clipped_terms
from headrace.trainer.losses.loss import Loss, MicroBatch, Reduction


class GspoLoss(Loss):
    """Clips the ratio of whole sequences instead of that of tokens.

    With s the geometric mean of the ratios exp(new - behaviour) of a sequence's tokens:

        term = - min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)

    - GSPO (arXiv 2507.18071), equations 5 and 7, with the defaults of its section 5.1. Each token
      has the value s and the gradient of its own logprob, as in the paper's GSPO-token (equation
      13), so the advantages of a sequence's turns may differ.
    - The ratio is to the engine that sampled, so the clip also limits stale samples. The bounds are
      small because s is a mean over many tokens. If clip_fraction is high (stale samples, short
      sequences, or an engine with other numerics), raise them.
    """

    reduction: Reduction = "sequence"
    clip_low: float = Field(default=3e-4, gt=0)
    """The ratio s is clipped from below to 1 - `clip_low`."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The ratio s is clipped from above to 1 + `clip_high`."""

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        ratio = (self.log_ratio(batch, logprobs.detach()) + logprobs - logprobs.detach()).exp()
        return clipped_terms(ratio, batch.advantages, self.clip_low, self.clip_high)

    def log_ratio(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the logarithm of s for each token, [N]."""
        return batch.sequence_mean(logprobs - batch.behaviour)
