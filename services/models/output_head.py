"""Runs a model up to its output head, so that logits can be computed for a few tokens at a time.

The logits of N tokens are [N, V]: 10 GB in float32 for 16,384 tokens and 151,936 ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError

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
                "that is not known here, so it can't be trained or score. Choose another model"
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
