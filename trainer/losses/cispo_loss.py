"""CISPO: clips the importance weight, and no token loses its gradient."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch


class CispoLoss(Loss):
    """REINFORCE with a clipped importance weight.

    With r = exp(new - behaviour), which has no gradient here:

        term = - clip(r, 1 - clip_low, 1 + clip_high) * A * new

    CISPO (MiniMax-M1, arXiv 2506.13585), with the paper's mean over all tokens. Clipped tokens keep
    a gradient, also the rare ones that begin a new thought. The paper sets no lower bound, as is
    the default here, and tunes the upper one.
    """

    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is clipped from below to 1 - `clip_low`. 1 sets no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is clipped from above to 1 + `clip_high`."""

    @property
    def importance_cap(self) -> float:
        """The largest weight. Metrics count how many weights it cuts."""
        return 1 + self.clip_high

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        ratio = (logprobs.detach() - batch.behaviour).exp()
        weights = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weights * batch.advantages * logprobs
