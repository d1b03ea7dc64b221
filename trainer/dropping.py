"""What a batch still trains on if a sample can't be trained on, or if memory does not suffice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from headrace.errors import HeadraceError
from headrace.trainer.sequences import (
    NothingFits,
    TokenSequence,
    UnusableBatch,
    UnusableSample,
    UpdateBatch,
)

logger = logging.getLogger(__name__)


class OutOfMemory(HeadraceError):
    """The device has too little memory for a micro-batch. Nothing was changed."""


def check_lengths(update: UpdateBatch, positions: int | None) -> None:
    """Raises UnusableSample if a sequence is longer than the model's table of positions, if any.

    A GPU would report it as a failed assertion, and serve the process no more.
    """
    for one in update.sequences:
        if positions is not None and len(one.tokens) > positions:
            raise UnusableSample(
                one.sample,
                f"one of its sequences has {len(one.tokens)} tokens, but the model has positions "
                f"for {positions}: lower tasks.max_tokens",
            )


@dataclass
class Remaining:
    """The updates that a batch still makes, and the reasons for what it does not train on."""

    updates: Sequence[UpdateBatch]
    max_tokens: int
    """Maximum number of tokens of one micro-batch."""
    largest: Callable[[UpdateBatch, int], int]
    """Returns the tokens of the largest micro-batch of an update, from the maximum."""
    reasons: list[str] = field(default_factory=list)
    """Why samples were dropped, one reason for each."""
    too_large: int = 0
    """How many of them the device has too little memory for."""
    retries: int = 0
    """How often the batch ran out of memory."""

    def shrink(self, error: OutOfMemory) -> None:
        """Halves the largest micro-batch. If it is one sequence, drops the sequence's sample.

        Raises UnusableBatch if no sample remains.
        """
        self.retries += 1
        longest = max(len(one.tokens) for one in self._sequences())
        largest = max(self.largest(update, self.max_tokens) for update in self.updates)
        if largest > longest:
            self.max_tokens = max(longest, largest // 2)
            return
        chosen = next(one for one in self._sequences() if len(one.tokens) == longest)
        self.too_large += 1
        self.drop(chosen.sample, f"{error}, and one of its sequences has {longest} tokens")

    def drop(self, sample: int, reason: str) -> None:
        """Drops a sample, by its index in the batch.

        Raises UnusableBatch if none remains: NothingFits if all were dropped for memory alone.
        """
        name = next(one.name for one in self._sequences() if one.sample == sample)
        self.reasons.append(f"{name}: {reason}")
        kept = [
            replace(update, sequences=[one for one in update.sequences if one.sample != sample])
            for update in self.updates
        ]
        self.updates = [update for update in kept if update.sequences]
        if not self.updates:
            all_too_large = self.too_large == len(self.reasons)
            raise (NothingFits if all_too_large else UnusableBatch)(
                f"none of its samples can be trained on. The last reason: {self.reasons[-1]}"
            )

    def train(self, attempt: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Attempts to train on what remains, until an attempt succeeds or no sample remains.

        An attempt returns metrics and may raise OutOfMemory or UnusableSample. Returns the metrics
        with more counts: `dropped_samples`, of which `dropped_samples_memory` did not fit into the
        memory, and `memory_retries`. Raises UnusableBatch if no sample remains.
        """
        while True:
            try:
                metrics = attempt()
                break
            except OutOfMemory as error:
                self.shrink(error)
            except UnusableSample as error:
                self.drop(error.sample, str(error))
            # Only now does nothing refer to the tensors of the failed attempt.
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        if self.retries:
            logger.warning(
                "ran out of memory %d times, and continued with micro-batches of at most %d tokens."
                " To avoid the repeated work, lower training.max_tokens",
                *(self.retries, self.max_tokens),
            )
        for reason in self.reasons:
            logger.warning("a sample is dropped: %s", reason)
        return metrics | {
            "dropped_samples": float(len(self.reasons)),
            "dropped_samples_memory": float(self.too_large),
            "memory_retries": float(self.retries),
        }

    def _sequences(self) -> Iterator[TokenSequence]:
        return (one for update in self.updates for one in update.sequences)
