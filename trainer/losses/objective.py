"""What training minimizes: the loss, and what the learner adds to every loss.

Each part is a term per token, which is weighed by `token_weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.schemas.recipe.policy import Training
from headrace.trainer.losses.loss import Loss, MicroBatch

STEEPEST = 5.0
"""The difference of logprobs above which `reference_kl` does not get steeper."""


class Objective(NamedTuple):
    """A micro-batch's sampled tokens as training minimizes them."""

    differentiable: Tensor
    """A scalar with the gradient of loss and regularizers. Its value means nothing."""
    value: Tensor
    """Loss and regularizers, a scalar without gradient."""
    gradient: Tensor
    """[N]: the gradient of the loss alone by each token's logprob. It says whether a token teaches
    anything."""
    divergence: Tensor | None
    """[N]: the estimates of the KL divergence from version 0, if there is a reference."""


def objective(
    loss: Loss,
    settings: Training,
    batch: MicroBatch,
    logprobs: Tensor,
    entropies: Tensor,
    weights: Tensor,
) -> Objective:
    """Returns the objective of N sampled tokens, from new logprobs [N] and entropies [N] in nats.

    The entropy bonus is that of PPO (arXiv 1707.06347), equation 9.
    """
    value, gradient = _loss_and_gradient(loss, batch, logprobs.detach(), weights)
    added, divergence = -settings.entropy_bonus * entropies, None
    if batch.reference is not None:
        divergence = reference_kl(logprobs, batch.reference)
        added = added + settings.kl_coefficient * divergence
        divergence = divergence.detach()
    differentiable = (gradient * logprobs).sum() + (weights * added).sum()
    return Objective(differentiable, value + (weights * added.detach()).sum(), gradient, divergence)


def _loss_and_gradient(
    loss: Loss, batch: MicroBatch, logprobs: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = logprobs.requires_grad_()
    value = (weights * loss.terms(batch, leaf)).sum()
    if not value.requires_grad:  # for example, a loss that masks every token
        return value, torch.zeros_like(leaf)
    [gradient] = torch.autograd.grad(value, leaf)
    return value.detach(), gradient


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Returns the cross-entropy of demonstrated tokens times the samples' weights, in nats, [N]."""
    return -weights * logprobs


def reference_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Returns an estimate of the KL divergence of the new policy from a reference, in nats, [N].

    With d = reference - new it is exp(d) - 1 - d: the estimator k3 of Schulman, "Approximating KL
    Divergence" (2020), which GRPO uses (arXiv 2402.03300, equation 4). It is never negative.

    - Over tokens that the new policy sampled, the mean of its values is KL(new || reference).
    - The mean of its gradients is not the gradient of that, but of KL(reference || new): it pulls
      most at tokens that the reference finds likely and the new policy does not. GRPO's paper and
      its implementations use it all the same.
    - Above d = `STEEPEST` it continues as the tangent. So one token adds at most exp(5) - 1 = 147
      times the coefficient to the gradient, and no difference makes the loss infinite. A clamp
      would take away the gradient where the policies differ most.
    """
    difference = reference - logprobs
    steep = difference.clamp(max=STEEPEST)
    return steep.exp() * (1 + difference - steep) - 1 - difference
