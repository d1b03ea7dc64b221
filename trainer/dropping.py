"""What a batch still trains on if a sample can't be trained on, or if memory does not suffice."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import HeadraceError
from headrace.trainer.collate import pack
from headrace.trainer.sequences import SampleKey, UnusableBatch, UpdateBatch

logger = logging.getLogger(__name__)


class OutOfMemory(HeadraceError):
    """The device has too little memory for a micro-batch. Nothing was changed."""


@dataclass
class Remaining:
    """The updates that a batch still makes, and the reasons for what it does not train on."""

    updates: Sequence[UpdateBatch]
    max_tokens: int
    """Maximum number of tokens of one micro-batch, including padding."""
    reasons: list[str] = field(default_factory=list)
    """Why samples were dropped, one reason for each."""
    retries: int = 0
    """How often the batch ran out of memory."""

    def shrink(self, error: OutOfMemory) -> None:
        """Halves the largest micro-batch. If it is one sequence, drops the sequence's sample.

        Raises UnusableBatch if no sample remains.
        """
        self.retries += 1
        lengths = [len(one.tokens) for update in self.updates for one in update.sequences]
        longest = max(lengths)
        largest = max(self._micro_batches())
        if largest > longest:
            self.max_tokens = max(longest, largest // 2)
            return
        chosen = next(
            one for update in self.updates for one in update.sequences if len(one.tokens) == longest
        )
        self.drop(chosen.sample, f"{error}, and one of its sequences has {longest} tokens")

    def drop(self, sample: SampleKey, reason: str) -> None:
        """Drops a sample. Raises UnusableBatch if no sample remains."""
        task, number = sample
        self.reasons.append(f"task {task} sample {number}: {reason}")
        kept = [
            replace(update, sequences=[one for one in update.sequences if one.sample != sample])
            for update in self.updates
        ]
        self.updates = [update for update in kept if update.sequences]
        if not self.updates:
            raise UnusableBatch(
                f"none of its samples can be trained on. The last reason: {self.reasons[-1]}"
            )

    def metrics(self) -> dict[str, float]:
        """Returns the counts `dropped_samples` and `memory_retries`."""
        return {
            "dropped_samples": float(len(self.reasons)),
            "memory_retries": float(self.retries),
        }

    def log(self) -> None:
        """Logs what was dropped and what cost time."""
        if self.retries:
            logger.warning(
                "ran out of memory %d times, and continued with micro-batches of at most %d tokens."
                " To avoid the repeated work, lower training.max_tokens",
                *(self.retries, self.max_tokens),
            )
        for reason in self.reasons:
            logger.warning("a sample is dropped: %s", reason)

    def _micro_batches(self) -> list[int]:
        """Returns the number of tokens of each micro-batch, padding included."""
        return [
            len(chosen) * max(lengths[index] for index in chosen)
            for update in self.updates
            for lengths in [[len(one.tokens) for one in update.sequences]]
            for chosen in pack(lengths, self.max_tokens)
        ]
