"""Applies the masks of JSON schemas to vLLM's batches. The trainer computes the same masks.

vLLM's own structured output needs vLLM's tokenizer and gives the trainer no masks. Import this
module after the environment variables that vLLM reads are set, as `vllm_engine` does.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from headrace.services.inference.engines.row import Row
from headrace.services.models.json_schema import GrammarState, masked

SCHEMA_OF = "headrace_row"
"""The extra sampling argument that holds a row's number."""


class VllmSchemaMasks(LogitsProcessor):  # type: ignore[misc]
    """The masks of one vLLM engine. Rows advance between its steps, in the engine's thread."""

    rows: ClassVar[WeakValueDictionary[int, Row]] = WeakValueDictionary()
    """The rows of all engines in the process that follow a schema, by number."""

    @classmethod
    def follow(cls, row: Row) -> int:
        """Registers a row, and returns the number that its sampling names it by."""
        cls.rows[id(row)] = row
        return id(row)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._grammars: dict[int, GrammarState] = {}
        """By index in vLLM's batch."""

    def is_argmax_invariant(self) -> bool:
        """Whether greedy rows may skip the mask: they may not."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Applies the changes of vLLM's batch, in vLLM's order: removed, added, moved."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._grammars.pop(index, None)
        for index, parameters, *_ in batch_update.added:
            self._grammars.pop(index, None)
            row = self.rows.get((parameters.extra_args or {}).get(SCHEMA_OF, 0))
            if row is not None and row.grammar is not None:
                self._grammars[index] = row.grammar
        for source, target, direction in batch_update.moved:
            left, right = self._grammars.pop(source, None), self._grammars.pop(target, None)
            if left is not None:
                self._grammars[target] = left
            if right is not None and direction == MoveDirectionality.SWAP:
                self._grammars[source] = right

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks logits [n, V]."""
        return masked(logits, [self._grammars.get(index) for index in range(len(logits))])
