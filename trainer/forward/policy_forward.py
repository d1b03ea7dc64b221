"""Runs the policy on token sequences: their hidden states, logprobs and entropies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.services.models.output_head import ChosenHidden
from headrace.trainer.collate import Inputs, SchemaMasks, collate
from headrace.trainer.forward.packable import learn_to_pack, require_causal
from headrace.trainer.forward.token_logprobs import token_logprobs
from headrace.trainer.losses.loss import Loss
from headrace.trainer.packing.micro_batches import Packer
from headrace.trainer.ranks.ranks import ALONE, Ranks
from headrace.trainer.sequences import TokenSequence, UpdateBatch, raise_if_stopped
from headrace.trainer.update_plan import UpdatePlan


class PolicyForward:
    """The forward passes of one model. What has a gradient depends on torch's grad mode."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        device: torch.device,
        entropy_gradient: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        """`folder` has the model's tokenizer. `entropy_gradient` says whether the loss uses it."""
        self._hidden_at = ChosenHidden(model)
        self._device = device
        self._ranks = ranks
        self._entropy_gradient = entropy_gradient
        self.width = self._hidden_at.width
        """H, the width of the hidden states."""
        require_causal(model, self._hidden_at, device)
        self.packed = learn_to_pack(model, self._hidden_at, device, ranks)
        """Whether the model reads packed sequences, instead of padded ones."""
        self._packer = Packer(ranks.size, self.width, self.packed)
        self.vocabulary = int(model.config.vocab_size)
        self._schemas = SchemaMasks(folder, self.vocabulary)

    def collate(
        self, sequences: Sequence[TokenSequence], stop: threading.Event | None = None
    ) -> Inputs:
        """Returns the sequences of a micro-batch as the model reads them.

        All ranks must call it for each micro-batch. If it fails in one of them, it fails in all,
        so none of them waits for the others in the model. Raises Stopped if `stop` is set, and
        UnusableSample.
        """

        def work() -> Inputs:
            raise_if_stopped(stop)
            known = (self.vocabulary, self._device, self._schemas)
            return collate(sequences, *known, packed=self.packed)

        return self._ranks.together(work)

    def plan(self, update: UpdateBatch, max_tokens: int, loss: Loss) -> UpdatePlan:
        """Divides an update into micro-batches of at most `max_tokens` tokens, among the ranks."""
        tokens = [one.tokens for one in update.sequences]
        shares = self._packer.divide(tokens, max_tokens)
        chosen = [[tokens[index] for index in one] for share in shares for one in share]
        read = sum(map(self._packer.read, chosen))
        return UpdatePlan(update, shares[self._ranks.rank], loss, self._device, read)

    def largest(self, update: UpdateBatch, max_tokens: int) -> int:
        """Returns the tokens of the largest micro-batch of an update, padding included."""
        tokens = [one.tokens for one in update.sequences]
        shares = self._packer.divide(tokens, max_tokens)
        chosen = [[tokens[index] for index in one] for share in shares for one in share]
        return max(map(self._packer.size, chosen))

    @contextmanager
    def keeping_masks(self) -> Iterator[None]:
        """Drops in the end the masks that `collate` kept for later passes over a batch."""
        try:
            yield
        finally:
            self._schemas.forget()

    def hidden(self, inputs: Inputs) -> Tensor:
        """Returns the last hidden states [N, H] before the trained tokens, which predict them."""
        more: dict[str, Any] = {"input_ids": inputs.ids, "use_cache": False}
        if inputs.packing is not None:
            more |= {"position_ids": inputs.packing.positions, "packing": inputs.packing}
        return self._hidden_at(inputs.rows, inputs.before, **more)

    def logprobs(self, inputs: Inputs, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns logprobs [N] of the trained tokens and entropies [N] of their distributions.

        `hidden` are the hidden states of `inputs`, if they are known.
        """
        hidden = self.hidden(inputs) if hidden is None else hidden
        logprobs, entropies = token_logprobs(hidden, inputs, self._hidden_at.head)
        # The gradient of the entropies costs time, so compute it only if it is used.
        return logprobs, entropies if self._entropy_gradient else entropies.detach()

    def all_logprobs(self, plan: UpdatePlan, stop: threading.Event | None) -> Tensor:
        """Returns the logprobs [T] of an update's trained tokens, without gradient."""
        [found] = self.read(plan, stop, self.read_logprobs)
        return found

    def read_logprobs(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """Returns the logprobs [N] of `inputs`: what `read` needs."""
        return self.logprobs(inputs, hidden)[0]

    def read(
        self,
        plan: UpdatePlan,
        stop: threading.Event | None,
        *readers: Callable[[Inputs, Tensor], Tensor],
    ) -> list[Tensor]:
        """Runs the model on an update's micro-batches, without gradient.

        Returns what each reader makes of inputs and hidden states [N, H], put together to [T].
        Raises Stopped if `stop` is set.
        """
        found = [torch.zeros_like(plan.weights) for _ in readers]
        with torch.no_grad():
            for sequences, tokens in plan.micro_batches:
                inputs = self.collate(sequences, stop)
                hidden = self.hidden(inputs)
                for whole, reader in zip(found, readers, strict=True):
                    whole[tokens] = reader(inputs, hidden)
            for sequences in plan.fillers:
                self.hidden(self.collate(sequences, stop))
        return [self._ranks.sum(whole) for whole in found]
