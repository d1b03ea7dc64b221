"""Masks of JSON schemas in vLLM's batches, as the trainer recomputes them.

vLLM's own would need its tokenizer, and tell the trainer nothing. To be imported after what vLLM
reads of the process's environment is set, as `vllm_engine` does.
"""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from headrace.services.inference.engines.row import Row
from headrace.services.models.json_schema import GrammarState, masked

SCHEMA_OF = "headrace_row"
"""The sampling's own argument that tells a row by its number."""


class VllmSchemaMasks(LogitsProcessor):  # type: ignore[misc]
    """Those of one of vLLM's engines. Rows are advanced between its steps, in its thread."""

    rows: ClassVar[WeakValueDictionary[int, Row]] = WeakValueDictionary()
    """By number: those that follow a schema, of all engines of the process."""

    @classmethod
    def follow(cls, row: Row) -> int:
        """The number by which a row's sampling names it."""
        cls.rows[id(row)] = row
        return id(row)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._grammars: dict[int, GrammarState] = {}
        """By place in vLLM's batch."""

    def is_argmax_invariant(self) -> bool:
        """Greedy rows are masked as well."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follows rows through vLLM's batch: what left, what came, what moved, in this order."""
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._grammars.pop(place, None)
        for place, parameters, *_ in batch_update.added:
            self._grammars.pop(place, None)
            row = self.rows.get((parameters.extra_args or {}).get(SCHEMA_OF, 0))
            if row is not None and row.grammar is not None:
                self._grammars[place] = row.grammar
        for source, target, direction in batch_update.moved:
            left, right = self._grammars.pop(source, None), self._grammars.pop(target, None)
            if left is not None:
                self._grammars[target] = left
            if right is not None and direction == MoveDirectionality.SWAP:
                self._grammars[source] = right

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks logits [n, V]."""
        return masked(logits, [self._grammars.get(place) for place in range(len(logits))])
