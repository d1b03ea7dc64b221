"""An update that is divided into micro-batches: what each trained token belongs to and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from headrace.trainer.critic.estimates import Doubles, Estimates
from headrace.trainer.losses.loss import Loss, MicroBatch, token_weights
from headrace.trainer.ranks.ranks import Ranks
from headrace.trainer.sequences import Floats, TokenSequence, UpdateBatch


class UpdatePlan:
    """The T trained tokens of an update, demonstrated ones included, on the learner's device."""

    def __init__(
        self,
        update: UpdateBatch,
        micro_batches: Sequence[Sequence[int]],
        loss: Loss,
        device: torch.device,
        read: int,
    ) -> None:
        """`micro_batches` has the indices of the sequences of each micro-batch of this rank. Some
        are empty if there is no work for all ranks. `read` is as the attribute."""
        counts = [len(one.positions) for one in update.sequences]
        samples = [one.sample for one in update.sequences]
        weights = token_weights(counts, samples, loss.reduction, loss.constant)
        self.weights = torch.from_numpy(weights).to(device)
        """[T] float32: the factor of each token's term in the loss."""
        self.sequences = update.sequences
        self.read = read
        """How many tokens the model reads for the update, without padding, over all ranks."""
        self._all = _all_tokens(update, counts, device)
        self.demonstrated = torch.from_numpy(
            np.concatenate([one.demonstrated for one in update.sequences])
        ).to(device)
        """[T] bool: whether the token was demonstrated."""
        ends = np.cumsum(counts)
        tokens = [torch.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]
        self.micro_batches: list[tuple[list[TokenSequence], Tensor]] = [
            (
                [update.sequences[index] for index in chosen],
                torch.cat([tokens[index] for index in chosen]).to(device),
            )
            for chosen in micro_batches
            if chosen
        ]
        """The sequences of each micro-batch of this rank, and the indices of their trained tokens,
        [N] int64."""
        shortest = min(update.sequences, key=lambda one: len(one.tokens))
        self.fillers = [[shortest]] * (len(micro_batches) - len(self.micro_batches))
        """What this rank runs the model with, in vain, while others have more micro-batches."""
        self.proximal: Tensor | None = None
        """[T] float32: logprobs at the batch's start. None if the new ones are those."""
        self._noted = torch.zeros_like(self.weights)
        self.reference: Tensor | None = None
        """[T] float32: logprobs by version 0, if the learner has a reference."""
        self.values: Tensor | None = None
        """[T] float32: the critic's values at the batch's start. None without a critic."""
        self.returns: Tensor | None = None
        """[T] float32: what the values should have been. None without a critic, and
        without sampled tokens."""
        self.value_weights = self.weights * self._all.advantages
        """[T] float32: with a critic, the factor of each value's term in the loss. `advantages` are
        the weights of the samples until `use` multiplies them."""

    def use(self, estimates: Estimates) -> None:
        """Uses what the critic says of the sampled tokens: returns, and advantages for the loss."""

        def spread(numbers: Doubles) -> Tensor:
            found = torch.zeros(len(self.weights))
            found[torch.from_numpy(estimates.tokens)] = torch.from_numpy(numbers).float()
            return found.to(self.weights.device)

        self.returns = spread(estimates.returns)
        advantages = self._all.advantages * spread(estimates.advantages)
        self._all = replace(self._all, advantages=advantages)

    def note(self, chosen: Tensor, logprobs: Tensor) -> None:
        """Notes the new logprobs of the tokens with the indices `chosen` [N], for `by_sequence`."""
        self._noted[chosen] = logprobs

    def by_sequence(self, ranks: Ranks) -> list[tuple[TokenSequence, Floats]]:
        """Returns the sequences, each with its logprobs [N] at the batch's start.

        Without `proximal`, the ranks together must have noted all tokens.
        """
        known = ranks.sum(self._noted) if self.proximal is None else self.proximal
        whole = known.cpu().numpy()
        ends = np.cumsum([len(one.positions) for one in self.sequences])
        return list(zip(self.sequences, np.split(whole, ends[:-1]), strict=True))

    def tokens(self, chosen: Tensor, logprobs: Tensor, state: object = None) -> MicroBatch:
        """Returns the tokens with the indices `chosen` [N], of which `logprobs` are the new ones.

        The logprobs have no gradient.
        """
        values = {one.name: getattr(self._all, one.name) for one in fields(MicroBatch)}
        taken = {
            name: value[chosen] if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        return replace(
            MicroBatch(**taken),
            proximal=logprobs if self.proximal is None else self.proximal[chosen],
            reference=None if self.reference is None else self.reference[chosen],
            state=state,
        )


def _all_tokens(update: UpdateBatch, counts: Sequence[int], device: torch.device) -> MicroBatch:
    """Returns all trained tokens of an update, with the engine's logprobs as the proximal ones."""
    sequences = update.sequences
    behaviour = np.concatenate([one.behaviour for one in sequences])
    demonstrated = np.concatenate([one.demonstrated for one in sequences])
    versions = np.concatenate([one.versions for one in sequences])
    turns = [count for one in sequences for _, count in one.samplings]
    arrays = {
        "behaviour": behaviour,
        "proximal": behaviour,
        "advantages": np.concatenate([one.advantages for one in sequences]),
        "tokens": np.cumsum(~demonstrated) - 1,
        "sequences": np.repeat(np.arange(len(sequences)), counts),
        "lengths": np.repeat([int((~one.demonstrated).sum()) for one in sequences], counts),
        "samples": np.repeat([one.sample for one in sequences], counts),
        "groups": np.repeat([one.group for one in sequences], counts),
        "turns": np.repeat(np.arange(len(turns)), turns),
        "versions": versions,
        "staleness": update.newest - versions,
        "uses": np.repeat([one.use for one in sequences], counts),
    }
    taught = [one.teacher for one in sequences if one.teacher is not None]
    if taught:
        arrays["teacher"] = np.concatenate(taught)
    kinds = {"f": torch.float32, "i": torch.int64}
    return MicroBatch(
        **{
            name: torch.as_tensor(array, dtype=kinds[array.dtype.kind]).to(device)
            for name, array in arrays.items()
        }
    )
