"""Losses by name. A loss is one function of a micro-batch and the new logprobs.

Your own loss is named in the recipe as `package.module:function` and takes the same two arguments.
Sum over the micro-batch's tokens and divide by `denominator`, which counts the tokens of the whole
update. Then the result does not depend on how the tokens are divided into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import Training
from headrace.services.base.plugins import load


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N sampled tokens of one forward pass, flat. All tensors are float32 of shape [N].

    Logprobs are in nats, after temperature and masks.
    """

    behaviour: Tensor
    """Logprobs by the engine that sampled the tokens."""
    proximal: Tensor
    """Logprobs by the trainer's weights before the batch's first update. PPO keeps the new policy
    close to this one. Without gradient."""
    advantages: Tensor
    """Advantages times the sample's weight."""
    denominator: int
    """Number of trained tokens in the whole update, demonstrated ones included."""
    settings: Training
    """The policy's `training` section of the recipe."""


Loss = Callable[[MicroBatch, Tensor], Tensor]
"""Maps (micro-batch, new logprobs [N] with gradient) to a scalar, which is minimised."""

LOSSES = {"grpo": f"{__name__}:grpo"}
"""The built-in losses by the recipe's name."""


def grpo(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """Returns PPO's clipped surrogate with truncated importance weights, averaged over tokens.

    With A the advantage, r = exp(new - proximal) and w = min(exp(proximal - behaviour), cap):

        loss = - sum over tokens of w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
                 / number of trained tokens of the update

    - The clipped surrogate is equation 7 of PPO (arXiv 1707.06347). GRPO (DeepSeekMath,
      arXiv 2402.03300) uses it with group-relative advantages; its KL term is left out.
    - The two clip bounds and the mean over all tokens are DAPO's (arXiv 2503.14476, sections 3.1
      and 3.3). GRPO takes the mean of each sequence first, so a token of a long sequence counts
      less. Dr. GRPO (arXiv 2503.20783) divides by a constant, not by the number of tokens.
    - w has no gradient. It is truncated importance sampling (Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"). It corrects both for stale samples
      and for numerical differences between engine and trainer.

    `logprobs` is [N] with gradient; the result is a scalar.
    """
    settings = batch.settings
    ratio = (logprobs - batch.proximal).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return -(importance(batch) * surrogate).sum() / batch.denominator


def cross_entropy(logprobs: Tensor, weights: Tensor, denominator: int) -> Tensor:
    """Returns the weighted cross-entropy of demonstrated tokens, in nats: a scalar.

    `logprobs` are the new logprobs [N], `weights` the samples' weights [N]. The denominator is that
    of `grpo`, so one update can hold demonstrated and sampled tokens.
    """
    return -(weights * logprobs).sum() / denominator


def importance(batch: MicroBatch) -> Tensor:
    """Returns each token's truncated importance weight, [N]: min(proximal / behaviour, cap)."""
    return (batch.proximal - batch.behaviour).exp().clamp(max=batch.settings.importance_cap)


def entropy_bonus(batch: MicroBatch, entropies: Tensor) -> Tensor:
    """Returns what the learner subtracts from every loss, from entropies [N] in nats: a scalar.

    It is the coefficient `entropy_bonus` times the sum of the entropies, divided by the same
    denominator as the loss: PPO (arXiv 1707.06347), equation 9.
    """
    return batch.settings.entropy_bonus * entropies.sum() / batch.denominator


def try_loss(settings: Training) -> None:
    """Calls the recipe's loss with a few numbers. Raises UsageError if it is not a usable loss."""
    loss: Any = load("loss", settings.loss, LOSSES)
    advantages = torch.tensor([-0.4, 0.6, -0.4, 0.2])
    logprobs = torch.full_like(advantages, -1.0, requires_grad=True)
    batch = MicroBatch(
        behaviour=torch.full_like(advantages, -1.1),
        proximal=torch.full_like(advantages, -1.0),
        advantages=advantages,
        denominator=len(advantages),
        settings=settings,
    )
    value = loss(batch, logprobs)
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"it returned {shape}: return a scalar tensor")
    if not value.requires_grad:
        raise UsageError("its value has no gradient: compute it from the new logprobs")
    if not math.isfinite(value.item()):
        raise UsageError(f"it returned {value.item()} for finite numbers")
