"""Computes the logprobs of given tokens as the trainer does: in one pass, without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import ScoredRun
from headrace.services.inference.engines.row import Outcome, ScoreRow
from headrace.services.models.json_schema import GrammarState
from headrace.services.models.output_head import CHUNK, ChosenHidden


@dataclass(slots=True)
class _Segment:
    """Tokens that are scored together, because they were sampled in the same way."""

    row: int
    run: ScoredRun
    grammar: GrammarState | None
    first: int
    """Index of the first one among the N tokens of all rows."""
    end: int

    def continues(self, run: ScoredRun, grammar: GrammarState | None) -> bool:
        """Whether the tokens of the next run can be scored with these."""
        same = (run.temperature, run.allowed) == (self.run.temperature, self.run.allowed)
        return same and grammar is None and self.grammar is None


class TorchScorer:
    """Scores sequences with one policy's model. Use it under `torch.inference_mode`."""

    def __init__(self, model: Any) -> None:
        """Raises UsageError if the model changes its logits in an unknown way."""
        self._hidden_at = ChosenHidden(model)
        self._device = model.device

    def score(self, rows: Sequence[ScoreRow], version: int) -> list[Outcome]:
        """Scores the runs of the rows, which are padded to the longest."""
        longest = max(len(row.prompt.tokens) for row in rows)
        padded = [[*row.prompt.tokens, *[0] * (longest - len(row.prompt.tokens))] for row in rows]
        ids = torch.tensor(padded, device=self._device)
        counts = [sum(run.count for run in row.prompt.runs) for row in rows]
        numbers = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
        positions = torch.cat(
            [
                torch.arange(run.first, run.first + run.count)
                for row in rows
                for run in row.prompt.runs
            ]
        )
        numbers, positions = numbers.to(self._device), positions.to(self._device)
        hidden = self._hidden_at(numbers, positions - 1, input_ids=ids, use_cache=False)
        found, failed = self._logprobs(hidden, ids[numbers, positions], _segments(rows))
        outcomes: list[Outcome] = []
        for number, (row, part) in enumerate(zip(rows, torch.split(found, counts), strict=True)):
            try:
                if number in failed:
                    raise failed[number]
                outcomes.append((row, row.scored(part.tolist(), version)))
            except InfrastructureError as error:
                outcomes.append((row, error))
        return outcomes

    def _logprobs(
        self, hidden: Tensor, targets: Tensor, segments: Sequence[_Segment]
    ) -> tuple[Tensor, dict[int, InfrastructureError]]:
        """Returns the logprobs [N] of N tokens, and the errors of rows that break their schema."""
        head = self._hidden_at.head
        size = max(1, CHUNK.get(hidden.device.type, CHUNK["cpu"]) // head.vocabulary)
        found = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        failed: dict[int, InfrastructureError] = {}
        for segment in segments:
            for first in range(segment.first, segment.end, size):
                part = slice(first, min(first + size, segment.end))
                scores = head.processing(head.layer(hidden[part])).float() / segment.run.temperature
                try:
                    _mask(scores, targets[part], segment)
                except ValueError as error:
                    reason = f"the sequence does not follow its JSON schema: {error}"
                    failed[segment.row] = InfrastructureError("masks", reason, retryable=False)
                    break
                chosen = scores.gather(1, targets[part].unsqueeze(1)).squeeze(1)
                found[part] = chosen - scores.logsumexp(-1)
        return found, failed


def _segments(rows: Sequence[ScoreRow]) -> list[_Segment]:
    segments: list[_Segment] = []
    end = 0
    for number, row in enumerate(rows):
        for run, grammar in zip(row.prompt.runs, row.grammars, strict=True):
            first, end = end, end + run.count
            if segments and segments[-1].continues(run, grammar):
                segments[-1].end = end
            else:
                segments.append(_Segment(number, run, grammar, first, end))
    return segments


def _mask(scores: Tensor, targets: Tensor, segment: _Segment) -> None:
    """Sets the scores [n, V] of ids that could not be sampled to -inf, inside `scores`.

    Advances the segment's grammar state. Raises ValueError if a target breaks the schema.
    """
    if segment.run.allowed:
        forbidden = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
        forbidden[list(segment.run.allowed)] = False
        scores.masked_fill_(forbidden, -torch.inf)
    if segment.grammar is not None:
        for row, token in zip(scores, targets.tolist(), strict=True):
            allowed = segment.grammar.allowed().to(scores.device)
            row[: len(allowed)].masked_fill_(~allowed, -torch.inf)
            row[len(allowed) :] = -torch.inf
            segment.grammar.accept(token)
