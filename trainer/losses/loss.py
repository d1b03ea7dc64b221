"""The interface of a loss: per-token terms of a micro-batch, and how they are reduced.

The learner calls `Loss.prepare` once for each update if the loss has it, then `Loss.terms` for each
micro-batch, and multiplies the terms by `token_weights`. Weights follow from the whole update, so
the result does not depend on how an update is divided into micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PrivateAttr
from torch import Tensor

from headrace.schemas.recipe.tables import Positive, Settings

Floats = NDArray[np.float32]
Reduction = Literal["token", "sequence", "constant"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N sampled tokens, flat: those of a micro-batch, or in `Loss.prepare` those of the update.

    Logprobs are float32 [N], in nats, after temperature and masks, and without gradient. A sequence
    is whole: all of its sampled tokens are in the same micro-batch.
    """

    behaviour: Tensor
    """Logprobs by the engine that sampled the tokens."""
    proximal: Tensor
    """Logprobs by the trainer's weights before the batch's first update. They are the new logprobs
    if a batch has one update."""
    advantages: Tensor
    """[N] float32: advantages times the sample's weight."""
    tokens: Tensor
    """[N] int64: the token's index among the sampled tokens of the update."""
    sequences: Tensor
    """[N] int64: the index of the token's sequence in the update."""
    lengths: Tensor
    """[N] int64: how many sampled tokens the token's sequence has."""
    samples: Tensor
    """[N] int64: the index of the token's sample in the batch."""
    groups: Tensor
    """[N] int64: the index of the sample's group in the batch."""
    turns: Tensor
    """[N] int64: the index of the token's turn in the update."""
    versions: Tensor
    """[N] int64: the policy version that sampled the token."""
    staleness: Tensor
    """[N] int64: how many versions the token is behind the newest one before the batch."""
    uses: Tensor
    """[N] int64: in how many earlier batches the token's sample was. 0 means fresh."""
    reference: Tensor | None = None
    """Logprobs by version 0; None unless the recipe has a `kl_coefficient` or the loss needs it."""
    teacher: Tensor | None = None
    """Logprobs by the policy's teacher; None unless the recipe has one."""
    state: Any = None
    """What `Loss.prepare` returned."""

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Returns for each token the mean of `values` [N] over the tokens of its sequence, [N]."""
        sums = values.new_zeros(int(self.sequences.max()) + 1)
        return sums.index_add(0, self.sequences, values)[self.sequences] / self.lengths


class Loss(Settings):
    """A loss. Its fields are its options in the recipe, which have these two from the start.

    A subclass implements `terms`, and `prepare` if it needs a look at the whole update first.
    """

    clips: ClassVar[bool] = True
    """Whether a token without a gradient was clipped or masked, for the metrics."""
    needs_reference: ClassVar[bool] = False
    """Whether `MicroBatch.reference` must be there, also without a `kl_coefficient`. It costs a
    forward pass and, without an adapter, memory for a second copy of the weights."""
    reduction: Reduction = "token"
    """How the terms of the tokens become one number. `token`: their mean over all tokens of the
    update (DAPO, arXiv 2503.14476). `sequence`: the mean over samples of each sample's mean (GRPO
    as published, arXiv 2402.03300, where a sample is one sequence). `constant`: their sum, divided
    by the number of samples and by `constant` (Dr. GRPO, arXiv 2503.20783). If branches of an agent
    make several sequences of a sample, these share its weight."""
    constant: Positive = 1024
    """The divisor of the reduction `constant`, in tokens: the most that you expect of a sample."""

    def prepare(self, update: MicroBatch, logprobs: Tensor) -> Any:
        """Returns what `terms` needs to know of the whole update, as `MicroBatch.state`.

        `update` has all sampled tokens of the update, and `logprobs` are those by the weights that
        the update begins with: [T] without gradient. A loss with this method costs one more forward
        pass for each update, except for the first of several. It is not called if an update has no
        sampled tokens.
        """

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the loss of each token, [N]. `logprobs` are the new ones [N] with gradient."""
        raise NotImplementedError

    def log_ratio(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns the logarithm of the ratio that the loss clips, [N].

        Only metrics use it: they tell by its sign whether a token was clipped from below or above.
        By default it is the ratio of the new probability and the engine's.
        """
        return logprobs - batch.behaviour

    @property
    def prepares(self) -> bool:
        """Whether the loss has a `prepare` of its own."""
        return type(self).prepare is not Loss.prepare


class FunctionLoss(Loss):
    """A loss that is a plain function of a micro-batch and the new logprobs."""

    _function: Callable[[MicroBatch, Tensor], Tensor] = PrivateAttr()

    @classmethod
    def of(
        cls, function: Callable[[MicroBatch, Tensor], Tensor], options: dict[str, Any]
    ) -> FunctionLoss:
        """Wraps a function. Raises ValidationError for options that no loss has."""
        loss = cls.model_validate(options)
        loss._function = function
        return loss

    def terms(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """Returns what the function returns."""
        return self._function(batch, logprobs)


def token_weights(
    lengths: Sequence[int], samples: Sequence[int], reduction: Reduction, constant: int
) -> Floats:
    """Returns the weight of each trained token of an update, in the order of its sequences.

    `lengths` are the numbers of trained tokens of the update's S sequences, demonstrated ones
    included, and `samples` are the samples that they belong to. The sum of weight times term is the
    reduced loss.
    """
    of_sample: Counter[int] = Counter()
    for sample, length in zip(samples, lengths, strict=True):
        of_sample[sample] += length
    match reduction:
        case "token":
            by_sequence = [1 / sum(lengths)] * len(lengths)
        case "sequence":
            by_sequence = [1 / (len(of_sample) * of_sample[sample]) for sample in samples]
        case "constant":
            by_sequence = [1 / (len(of_sample) * constant)] * len(lengths)
    return np.repeat(np.array(by_sequence, dtype=np.float32), lengths)
