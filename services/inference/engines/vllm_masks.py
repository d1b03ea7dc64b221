"""Applies the masks of JSON schemas to vLLM's batches. The trainer computes the same masks.

vLLM's own structured output needs vLLM's tokenizer and gives the trainer no masks. Import this
module after the environment variables that vLLM reads are set, as `vllm_engine` does.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from headrace.services.models.json_schema import GrammarState, masked

SCHEMA_OF = "headrace_schema"
"""The extra sampling argument that holds the number of a sequence's grammar state."""


class SentMask:
    """What a sequence may draw next, as the worker's grammar state packed it for a rank."""

    def __init__(self, packed: bytes, vocabulary: int) -> None:
        self._packed, self._vocabulary = packed, vocabulary

    def allowed(self) -> torch.Tensor:
        """As `GrammarState.allowed`."""
        bits = np.frombuffer(self._packed, dtype=np.uint8)
        allowed = np.unpackbits(bits, count=self._vocabulary, bitorder="little")
        return torch.from_numpy(allowed).bool()


class VllmSchemaMasks(LogitsProcessor):  # type: ignore[misc]
    """The masks of one vLLM engine. Grammar states advance between its steps."""

    states: ClassVar[MutableMapping[int, GrammarState | SentMask]] = WeakValueDictionary()
    """The states of all engines in the process, by number. In a rank those of its next step."""

    @classmethod
    def follow(cls, grammar: GrammarState) -> dict[str, int]:
        """Registers a grammar state, and returns the sampling argument that names it."""
        cls.states[id(grammar)] = grammar
        return {SCHEMA_OF: id(grammar)}

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._numbers: dict[int, int] = {}
        """By index in vLLM's batch."""

    def is_argmax_invariant(self) -> bool:
        """Whether greedy rows may skip the mask: they may not."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Applies the changes of vLLM's batch, in vLLM's order: removed, added, moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._numbers.pop(index, None)
        for index, parameters, *_ in batch_update.added:
            self._numbers.pop(index, None)
            number = (parameters.extra_args or {}).get(SCHEMA_OF)
            if number is not None:
                self._numbers[index] = number
        for source, target, direction in batch_update.moved:
            left, right = self._numbers.pop(source, None), self._numbers.pop(target, None)
            if left is not None:
                self._numbers[target] = left
            if right is not None and direction == MoveDirectionality.SWAP:
                self._numbers[source] = right

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks logits [n, V]."""
        if not self._numbers:
            return logits
        numbers = [self._numbers.get(index) for index in range(len(logits))]
        return masked(logits, [None if one is None else self.states.get(one) for one in numbers])
