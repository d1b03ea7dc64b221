"""Losses by name. A loss is one function of a micro-batch and the new logprobs.

Your own is named in the recipe as `package.module:function`, with the same two arguments. Sum
over the tokens and divide by `denominator`: it counts the whole update, so that how the tokens
fall into micro-batches and ranks changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.schemas.recipe.policy import Training
from headrace.services.base.plugins import Loader


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N trained tokens of one forward pass, flat. All tensors are float32 of shape [N]."""

    behaviour: Tensor
    """Logprobs by the engine that drew the tokens, after temperature and masks."""
    proximal: Tensor
    """Logprobs by the trainer at the batch's start, processed alike: the one to stay close to."""
    advantages: Tensor
    """Times the sample's weight."""
    denominator: int
    """Trained tokens of the whole update, on all ranks."""
    settings: Training


Loss = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, new logprobs [N]) to a scalar."""

LOSSES: dict[str, Loader] = {"grpo": lambda: grpo}
"""The built-in losses by the recipe's name."""


def grpo(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """PPO's clipped surrogate on group advantages, corrected for what the engine drew off policy.

    - The clipped surrogate: PPO (arXiv 1707.06347), equation 7, against the proximal policy; on
      group-relative advantages as in GRPO (DeepSeekMath, arXiv 2402.03300), without its KL term.
    - The mean runs over all tokens, not per sequence: Dr. GRPO (arXiv 2503.20783), section 3.
    - Each token is weighed by min(proximal / behaviour, cap), without gradient: truncated
      importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
      off-policy RL training"). It covers staleness and the engine's other kernels alike.
    """
    settings = batch.settings
    ratio = (logprobs - batch.proximal).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    return -(importance(batch) * surrogate).sum() / batch.denominator


def cross_entropy(logprobs: Tensor, weights: Tensor, denominator: int) -> Tensor:
    """Of demonstrated tokens, by their new logprobs [N] and the samples' weights [N]: a scalar.

    The mean runs over all tokens of the update, as the surrogate's, so both may be in one batch.
    """
    return -(weights * logprobs).sum() / denominator


def importance(batch: MicroBatch) -> Tensor:
    """The truncated importance weight of each token, [N]."""
    return (batch.proximal - batch.behaviour).exp().clamp(max=batch.settings.importance_cap)


def entropy_bonus(batch: MicroBatch, entropies: Tensor) -> Tensor:
    """What every loss is lowered by, from entropies [N]: a scalar, 0 at the coefficient 0.

    The coefficient times the mean over all tokens, as the surrogate's: PPO (arXiv 1707.06347),
    equation 9.
    """
    return batch.settings.entropy_bonus * entropies.sum() / batch.denominator
