"""One policy's model, and the sequences that it continues together.

Sequences use rows 0..n-1 of the cache without gaps, so a step can work on views. A new sequence
gets the row after the last one. If a sequence leaves, the last rows move into the gap.

Prompts are right-padded and read under a plain causal mask: a token never attends to the padding
after it. The model is called only through its public `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headrace.errors import InfrastructureError
from headrace.services.inference.engines.row import Outcome, Row, ScoreRow
from headrace.services.inference.engines.torch_cache import CacheTarget, SlotLayer
from headrace.services.inference.engines.torch_sampling import SamplingPlan, draw, plan_sampling
from headrace.services.inference.engines.torch_scoring import TorchScorer
from headrace.services.models.even_rounding import round_evenly
from headrace.services.models.json_schema import masked
from headrace.services.models.torch_models import ChosenLogits

R = TypeVar("R", Row, ScoreRow)
PREFILL_TOKENS = {"cpu": 1_024, "cuda": 16_384}
"""Maximum tokens of one forward pass over prompts, with padding, unless a prompt is longer.

The value for a CPU is small enough for its caches, and large enough that the call overhead of a
tiny model is negligible (measured: 256 prompts of 20 to 60 tokens take 49 ms at 1,024 and 67 ms at
4,096).
"""
CALL_WORK = 40e6
"""A forward pass on a CPU costs as much as so many floating-point operations, whatever it reads
(measured: 0.9 ms for two small layers, at 42 GFLOPS)."""


class PolicyBatch:
    """Continuous batching of one policy. Use it in one thread, under `torch.inference_mode`."""

    def __init__(self, model: Any, own: Mapping[str, Tensor]) -> None:
        """`model` is a transformers causal language model. Its methods have no types.

        `own` holds the tensors that a new version changes, by their names in the version's file.
        """
        self.model = model.eval()
        round_evenly(model)
        self.own = own
        self.version = -1
        self.rows: list[Row] = []
        self.device = model.device
        self._vocabulary = int(model.config.vocab_size)
        self._target = CacheTarget()
        self._layers = [SlotLayer(self._target) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=[*self._layers])
        self._plan: SamplingPlan | None = None
        self._logits_at = ChosenLogits(model)
        self._scorer: TorchScorer | None = None
        self._free_padding = 0
        """Tokens of padding that cost less than one more forward pass. On a GPU: not measured."""
        if self.device.type == "cpu":
            self._free_padding = int(CALL_WORK / (2 * model.num_parameters()))

    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copies checked weights into the model. The KV cache stays as it is."""
        for name, value in state.items():
            self.own[name].copy_(value)
        self.version = version

    def drop_cancelled(self) -> None:
        """Frees the rows of cancelled prompts."""
        if any(row.cancelled for row in self.rows):
            self._keep([row for row in self.rows if not row.cancelled])

    def take_all(self) -> list[Row]:
        """Removes and returns all rows. Zeroes their cache: a failed step may have damaged it."""
        self._clear(self.rows)
        rows, self.rows, self._plan = self.rows, [], None
        return rows

    def prefill(self, rows: Sequence[Row]) -> list[Outcome]:
        """Reads prompts and draws their first tokens. Sequences that end with these get no row."""
        for row in rows:
            if row.prompt.seed is not None and row.prompt.temperature:
                row.generator = torch.Generator(self.device).manual_seed(row.prompt.seed)
        outcomes: list[Outcome] = []
        single = [row for row in rows if row.limit == 1]
        longer = [row for row in rows if row.limit > 1]
        for keep, group in ((False, single), (True, longer)):
            for bucket in self._buckets(group):
                first = len(self.rows) if keep else -1
                if keep:
                    self.rows += bucket
                    self._plan = None
                outcomes += self._finish(self._read(bucket, first), bucket)
        return outcomes

    def score(self, rows: Sequence[ScoreRow]) -> list[Outcome]:
        """Computes the logprobs of given tokens. Nothing of them stays in the cache."""
        if not rows:
            return []
        self._scorer = self._scorer or TorchScorer(self.model)
        outcomes: list[Outcome] = []
        for bucket in self._buckets(rows):
            outcomes += self._scorer.score(bucket, self.version)
        return outcomes

    def decode(self) -> list[Outcome]:
        """Draws the next token of every row."""
        if not self.rows:
            return []
        rows = self.rows
        positions = torch.tensor([row.position for row in rows], device=self.device)
        tokens = torch.tensor([[row.tokens[-1]] for row in rows], device=self.device)
        self._target.rows = torch.arange(len(rows), device=self.device)
        self._target.positions = positions
        self._target.length = length = max(row.position for row in rows) + 1
        seen = torch.arange(length, device=self.device) <= positions.unsqueeze(1)
        logits = self.model(
            input_ids=tokens,
            position_ids=positions.unsqueeze(1),
            attention_mask=seen[:, None, None, :],
            past_key_values=self._cache,
            use_cache=True,
        ).logits
        if self._plan is None:
            self._plan = self._plan_of(rows)
        return self._finish(self._draw(logits[:, -1], self._plan, rows), rows)

    def _buckets(self, rows: Sequence[R]) -> list[list[R]]:
        return buckets(rows, PREFILL_TOKENS[self.device.type], self._free_padding)

    def _read(self, rows: Sequence[Row], first: int) -> list[tuple[int, float]]:
        longest = max(len(row.prompt.tokens) for row in rows)
        padded = [[*row.prompt.tokens, *[0] * (longest - len(row.prompt.tokens))] for row in rows]
        ends = torch.tensor([len(row.prompt.tokens) - 1 for row in rows], device=self.device)
        self._target.rows, self._target.first = None, first
        logits = self._logits_at(
            torch.arange(len(rows), device=self.device),
            ends,
            input_ids=torch.tensor(padded, device=self.device),
            past_key_values=self._cache,
            use_cache=True,
        )
        return self._draw(logits, self._plan_of(rows), rows)

    def _plan_of(self, rows: Sequence[Row]) -> SamplingPlan:
        return plan_sampling([row.prompt for row in rows], self._vocabulary, self.device)

    def _draw(
        self, logits: Tensor, plan: SamplingPlan, rows: Sequence[Row]
    ) -> list[tuple[int, float]]:
        scores = masked(logits, [row.grammar for row in rows])
        ids, logprobs = draw(scores, plan, [row.generator for row in rows])
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))

    def _finish(self, drawn: Sequence[tuple[int, float]], rows: Sequence[Row]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for row, (token, logprob) in zip(rows, drawn, strict=True):
            try:
                finish = row.add(token, logprob, self.version)
            except InfrastructureError as error:
                outcomes.append((row, error))
                self._clear([row])
            else:
                if finish is not None:
                    outcomes.append((row, row.output(finish)))
        if outcomes:
            ended = {row for row, _ in outcomes}
            self._keep([row for row in self.rows if row not in ended])
        return outcomes

    def _clear(self, rows: Sequence[Row]) -> None:
        indices = [index for index, row in enumerate(self.rows) if row in rows]
        if indices:
            index = torch.tensor(indices, device=self.device)
            for layer in self._layers:
                layer.clear(index)

    def _keep(self, stay: list[Row]) -> None:
        """Drops all rows except `stay`. The last rows that stay move into the gaps."""
        if len(stay) == len(self.rows):
            return
        indices = {row: index for index, row in enumerate(self.rows)}
        staying = set(stay)
        gaps = [indices[row] for row in self.rows[: len(stay)] if row not in staying]
        moved = [row for row in stay if indices[row] >= len(stay)]
        if moved:
            sources = torch.tensor([indices[row] for row in moved], device=self.device)
            targets = torch.tensor(gaps, device=self.device)
            for layer in self._layers:
                layer.move(sources, targets)
        kept = self.rows[: len(stay)]
        for gap, row in zip(gaps, moved, strict=True):
            kept[gap] = row
        self.rows, self._plan = kept, None


def buckets(rows: Sequence[R], limit: int, free_padding: int = 0) -> list[list[R]]:
    """Groups rows by the length of their prompts, so that padding stays below about an eighth, or
    below `free_padding` tokens a bucket.

    A bucket has at most `limit` tokens with padding, and at least one row.
    """
    ordered = sorted(rows, key=lambda row: len(row.prompt.tokens), reverse=True)
    result: list[list[R]] = []
    longest = padding = 0
    for row in ordered:
        length = len(row.prompt.tokens)
        gap = longest - length
        fits = result and (len(result[-1]) + 1) * longest <= limit
        if not fits or (gap > max(4, longest // 8) and padding + gap > free_padding):
            result.append([])
            longest, padding, gap = length, 0, 0
        padding += gap
        result[-1].append(row)
    return result
