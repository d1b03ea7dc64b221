"""What training minimizes: the loss, and what the learner adds to every loss.

Each part is a term per token, which is weighed by `token_weights`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.schemas.recipe.policy import Training
from headrace.trainer.losses.loss import Loss, MicroBatch


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
    """
    difference = reference - logprobs
    return difference.exp() - 1 - difference
