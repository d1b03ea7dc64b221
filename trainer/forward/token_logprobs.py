"""Logprobs and entropies of the trained tokens, in memory that does not grow with the vocabulary.

The logits of N tokens are [N, V]: 10 GB in float32 for 16,384 tokens and 151,936 ids. So they are
computed for a few tokens at a time, in the forward pass and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headrace.errors import UsageError
from headrace.trainer.collate import Inputs

CHUNK = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Maximum number of logits at once, by type of device. A chunk has at least one token.

That is 110 or 883 tokens of 151,936 ids, and 64 or 512 MB in float32. The more tokens, the fewer
times the gradient of the head's weight is read and written.
"""


def _unchanged(logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True, slots=True)
class Head:
    """The last part of a model: from hidden states [n, H] to logits [n, V]."""

    layer: Callable[[Tensor], Tensor]
    """From hidden states [n, H] to what the model makes its logits of, [n, V]."""
    vocabulary: int
    """V."""
    parameters: Sequence[Tensor] = ()
    """What learns in the layer."""
    processing: Callable[[Tensor], Tensor] = _unchanged
    """What the model does to the layer's output, [n, V]."""
    linear: bool = False
    """Whether the first parameter is the weight of a linear layer that has nothing else to learn.
    Then its gradient needs no second tensor of its size."""


class ChosenHidden:
    """Runs a causal language model up to its head, and returns hidden states at chosen positions.

    The model's own forward pass calls its head with no tokens at all.
    """

    def __init__(self, model: Any) -> None:
        """Raises UsageError if the model changes its logits in a way that is not known here.

        Runs the model once, with one token.
        """
        self._model = model
        self._module = model.get_output_embeddings()
        self._chosen: tuple[Tensor, Tensor] | None = None
        self._hidden: Tensor | None = None
        self._processing = _LogitsProcessing.of(model.config)
        self._check_processing()
        self._module.register_forward_pre_hook(self._choose)

    def __call__(self, rows: Tensor, columns: Tensor, **inputs: Any) -> Tensor:
        """Returns the hidden states [N, H] at the positions (rows [N], columns [N])."""
        self._chosen = rows, columns
        try:
            self._model(**inputs)
            assert self._hidden is not None, "the model did not call its output head"
            return self._hidden
        finally:
            self._chosen = self._hidden = None

    @property
    def width(self) -> int:
        """H, the width of the hidden states."""
        return int(self._module.weight.shape[1])

    @property
    def head(self) -> Head:
        """The model's head, with everything that the model does to its logits."""
        layer = self._module
        learning = [one for one in layer.parameters() if one.requires_grad]
        plain = type(layer) is nn.Linear and len(learning) == 1 and learning[0] is layer.weight
        return Head(layer, len(layer.weight), learning, self._processing, plain)

    def _choose(self, module: Any, hidden: tuple[Tensor]) -> tuple[Tensor] | None:
        if self._chosen is None:
            return None
        self._hidden = hidden[0][self._chosen]
        return (hidden[0][:, :0],)

    def _check_processing(self) -> None:
        """Compares what the model makes of known logits with what `head` would make of them."""
        known: list[Tensor] = []

        def replace_logits(module: Any, hidden: Any, logits: Tensor) -> Tensor:
            known.append(torch.linspace(-60, 60, logits.numel()).to(logits).view_as(logits))
            return known[0]

        handle = self._module.register_forward_hook(replace_logits)
        try:
            with torch.no_grad():
                ids = torch.zeros((1, 1), dtype=torch.int64, device=self._module.weight.device)
                made = self._model(input_ids=ids, use_cache=False).logits
        finally:
            handle.remove()
        if not known or not torch.equal(made.float(), self._processing(known[0]).float()):
            raise UsageError(
                f"{type(self._model).__name__} changes its logits after its output head in a way "
                "that the trainer does not know, so it can't be trained. Choose another model"
            )


@dataclass(frozen=True, slots=True)
class _LogitsProcessing:
    """What models of transformers do to the logits of their head, by their configuration."""

    softcap: float | None
    divisor: float | None
    factor: float | None

    @classmethod
    def of(cls, config: Any) -> _LogitsProcessing:
        names = ("final_logit_softcapping", "logits_scaling", "logit_scale")
        return cls(*(getattr(config, name, None) for name in names))

    def __call__(self, logits: Tensor) -> Tensor:
        """Computes in the dtype of the logits, as the engines do."""
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        return logits


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
