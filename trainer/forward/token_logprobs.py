"""Logprobs and entropies of the trained tokens, in memory that does not grow with the vocabulary.

The logits of N tokens are [N, V]: 10 GB in float32 for 16,384 tokens and 151,936 ids. So they are
computed for a few tokens at a time, in the forward pass and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headrace.services.models.output_head import CHUNK, Head
from headrace.trainer.collate import Inputs


def token_logprobs(
    hidden: Tensor, inputs: Inputs, head: Head, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns logprobs [N] of the trained tokens and entropies [N] of their distributions, in nats.

    `hidden` is [N, H]. The distribution is the one that each token was sampled from: its logits are
    divided by the temperature, ids that were not allowed get -inf, and the softmax is computed in
    float32. `chunk` is the maximum number of tokens at once; by default it follows from `CHUNK`.
    Has gradients for `hidden` and for the head's parameters. A parameter's gradient is added up in
    float32.
    """
    apply: Any = _TokenLogprobs.apply
    logprobs, entropies = apply(hidden, inputs, head, chunk, *head.parameters)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Keeps [N] numbers and the hidden states from forward to backward, and no logits.

    For one token, with z its scores, p their softmax, t the token and H the entropy:

        d logprob / dz_j = [j = t] - p_j        d H / dz_j = -p_j (log p_j + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, inputs: Inputs, head: Head, chunk: int | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        normalizers = hidden.new_empty(len(hidden), dtype=torch.float32)
        logprobs, entropies = torch.empty_like(normalizers), torch.empty_like(normalizers)
        ctx.size = chunk or max(1, CHUNK.get(hidden.device.type, CHUNK["cpu"]) // head.vocabulary)
        for part, some in _chunks(inputs, ctx.size):
            scores = _scores(head.processing(head.layer(hidden[part])), some)
            normalizers[part] = scores.logsumexp(-1)
            scores.sub_(normalizers[part].unsqueeze(1))
            logprobs[part] = scores.gather(1, some.targets.unsqueeze(1)).squeeze(1)
            probabilities = scores.exp()
            # An id that is not allowed has the logprob -inf and must add 0.
            entropies[part] = probabilities.mul_(scores.clamp_(min=-1e9)).sum(-1).neg_()
        ctx.inputs, ctx.head = inputs, head
        ctx.save_for_backward(hidden, normalizers, entropies)
        # The gradient of the entropies is None if the loss does not use them.
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, normalizers, entropies = ctx.saved_tensors
        head: Head = ctx.head
        into_hidden = torch.empty_like(hidden)
        sums = [torch.zeros_like(one, dtype=torch.float32) for one in head.parameters]
        for part, some in _chunks(ctx.inputs, ctx.size):
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                output = head.layer(leaf)
                logits = head.processing(output)
            scores = _scores(logits.detach(), some).sub_(normalizers[part].unsqueeze(1))
            gradient = _score_gradient(
                scores,
                some.targets,
                None if of_logprobs is None else of_logprobs[part],
                None if of_entropies is None else of_entropies[part],
                entropies[part],
            )
            gradient = gradient.div_(some.temperature).to(logits.dtype)
            others = () if head.linear else head.parameters
            into_hidden[part], into_output, *made = torch.autograd.grad(
                logits, (leaf, output, *others), gradient
            )
            for total, one in zip(sums, made, strict=False):
                total += one
            if head.linear:
                _add_product(sums[0], into_output, leaf.detach())
        return into_hidden, None, None, None, *sums


def _add_product(total: Tensor, into_output: Tensor, hidden: Tensor) -> None:
    """Adds the gradient of a linear layer's weight, [V, H], to `total`, which is float32."""
    if hidden.dtype == torch.float32 or hidden.device.type == "cpu":
        # No tensor of the size of the weight.
        total.addmm_(into_output.float().T, hidden.float())
    else:
        total += into_output.T @ hidden


def _score_gradient(
    logprobs: Tensor,
    targets: Tensor,
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    entropies: Tensor,
) -> Tensor:
    """Returns the gradient of the loss by the scores, [n, V]. Overwrites `logprobs`, [n, V].

    `of_logprobs` and `of_entropies`, [n], are its gradients by a token's logprob and entropy.
    """
    by_logprob = torch.zeros_like(entropies) if of_logprobs is None else of_logprobs
    if of_entropies is None:
        gradient = logprobs.exp_().mul_(-by_logprob.unsqueeze(1))
    else:
        probabilities = logprobs.exp()
        # p (log p + H) is 0 for an id that is not allowed, whose logprob is -inf.
        factor = logprobs.clamp_(min=-1e9).add_(entropies.unsqueeze(1))
        factor.mul_(of_entropies.unsqueeze(1)).add_(by_logprob.unsqueeze(1))
        gradient = factor.mul_(probabilities).neg_()
    return gradient.scatter_add_(1, targets.unsqueeze(1), by_logprob.unsqueeze(1))


def _scores(logits: Tensor, inputs: Inputs) -> Tensor:
    """Returns the logits after temperature and masks: a new tensor [n, V] in float32."""
    scores = logits.float() / inputs.temperature
    if inputs.allowed is not None:
        scores.masked_fill_(~inputs.allowed[inputs.allowed_set], -torch.inf)
    return scores


def _chunks(inputs: Inputs, size: int) -> Iterator[tuple[slice, Inputs]]:
    """Yields parts of the N tokens, and what the distribution of these tokens needs."""
    for first in range(0, len(inputs.targets), size):
        part = slice(first, first + size)
        yield (
            part,
            replace(
                inputs,
                targets=inputs.targets[part],
                temperature=inputs.temperature[part],
                allowed_set=inputs.allowed_set[part],
            ),
        )
