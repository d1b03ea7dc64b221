"""On-policy distillation: the policy learns from a teacher's logprobs of what it sampled itself."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch


class DistillLoss(Loss):
    """The reverse KL divergence from a teacher, by the policy gradient of each token.

    With t the teacher's logprob, A the advantage from rewards and w = min(exp(new - behaviour),
    cap), where w and D have no gradient:

        term = - w * D * new        D = coefficient * clip(t - new, clip) + reward_coefficient * A

    - The expected gradient of the first part is that of coefficient * KL(policy || teacher) of each
      token, given the tokens before it: GKD (arXiv 2306.13649) with on-policy data and the reverse
      KL, which MiniLLM (arXiv 2306.08543) minimizes, too. A token is charged its own divergence
      only, and not that of the tokens after it.
    - t - new is computed again in each update, and not from the engine's logprobs. So it is 0 for every
      token as soon as policy and teacher are equal, even for stale samples and later updates.
    - The teacher's logprob is that of the distribution that the token was sampled from: with the
      same temperature and masks.
    - w is truncated as in `reinforce` and corrects for stale samples.
    """

    coefficient: float = Field(default=1.0, gt=0)
    """Factor of the divergence from the teacher."""
    reward_coefficient: float = Field(default=0.0, ge=0)
    """Factor of the advantages from rewards. 0: the policy learns from the teacher alone."""
    clip: float = Field(default=10.0, gt=0)
    """The largest absolute t - new, in nats: one token that the teacher thinks impossible must not
    decide an update."""
    importance_cap: float = Field(default=2.0, gt=0)
    """The largest importance weight w."""

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the terms [N] of the class's docstring."""
        assert batch.teacher is not None, "the recipe requires a teacher for this loss"
        new = logprobs.detach()
        weights = (new - batch.behaviour).exp().clamp(max=self.importance_cap)
        lead = (batch.teacher - new).clamp(-self.clip, self.clip)
        directions = self.coefficient * lead + self.reward_coefficient * batch.advantages
        return -weights * directions * logprobs
