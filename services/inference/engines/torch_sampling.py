"""Draws one token for each row of logits, by the row's own settings, and returns its logprob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.services.inference.engine import EnginePrompt

Generators = Sequence[torch.Generator | None]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The sampling settings of a batch as tensors. A setting that no row uses is None.

    n is the number of rows and V the vocabulary size. `allowed` has 1 row if all rows share it.
    """

    greedy: Tensor | None
    """[n, 1] bool."""
    temperature: Tensor | None
    """[n, 1] float32; 1 for greedy rows."""
    allowed: Tensor | None
    """[n or 1, V] bool."""
    top_k: Tensor | None
    """[n, 1] int64; V if off."""
    top_p: Tensor | None
    """[n, 1] float32."""
    min_p: Tensor | None
    """[n, 1] float32."""


def plan_sampling(
    prompts: Sequence[EnginePrompt], vocabulary: int, device: torch.device
) -> SamplingPlan:
    """Makes the plan of a batch. It stays valid while the batch keeps its rows and their order."""

    def column(values: Sequence[float], off: float, dtype: torch.dtype) -> Tensor | None:
        if all(value == off for value in values):
            return None
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    return SamplingPlan(
        greedy=column([prompt.temperature == 0 for prompt in prompts], False, torch.bool),
        temperature=column([prompt.temperature or 1.0 for prompt in prompts], 1.0, torch.float32),
        allowed=_allowed(prompts, vocabulary, device),
        top_k=column([prompt.top_k or vocabulary for prompt in prompts], vocabulary, torch.int64),
        top_p=column([prompt.top_p for prompt in prompts], 1.0, torch.float32),
        min_p=column([prompt.min_p for prompt in prompts], 0.0, torch.float32),
    )


def draw(logits: Tensor, plan: SamplingPlan, generators: Generators) -> tuple[Tensor, Tensor]:
    """Draws from logits [n, V]. Returns ids [n] int64 and their logprobs [n] float32, in nats.

    A logprob is that of the distribution that was drawn from, after temperature and masks. For a
    greedy row it is the one at temperature 1. A row with its own generator draws reproducibly.
    """
    scores = logits.float()
    if plan.allowed is not None:
        scores = scores.masked_fill(~plan.allowed, -torch.inf)
    if plan.temperature is not None:
        scores = scores / plan.temperature
    if plan.top_k is not None or plan.top_p is not None:
        scores = _truncate(scores, plan)
    logprobs = torch.log_softmax(scores, dim=-1)
    if plan.min_p is not None:
        floor = logprobs.amax(-1, keepdim=True) + plan.min_p.log()
        logprobs = logprobs.masked_fill(logprobs < floor, -torch.inf).log_softmax(-1)
    ids = (logprobs + _gumbel(logprobs, plan, generators)).argmax(-1, keepdim=True)
    return ids.squeeze(1), logprobs.gather(1, ids).squeeze(1)


def _gumbel(logprobs: Tensor, plan: SamplingPlan, generators: Generators) -> Tensor:
    """Gumbel noise, 0 for greedy rows: argmax(logprobs + noise) is a draw (Gumbel, 1954)."""
    noise = torch.empty_like(logprobs).exponential_()
    for index, generator in enumerate(generators):
        if generator is not None:
            noise[index].exponential_(generator=generator)
    noise = noise.clamp_min_(torch.finfo(torch.float32).tiny).log_().neg_()
    return noise if plan.greedy is None else noise.masked_fill_(plan.greedy, 0.0)


def _truncate(scores: Tensor, plan: SamplingPlan) -> Tensor:
    """Keeps each row's `top_k` most likely ids, and of those the fewest that reach `top_p`."""
    ordered, ids = scores.sort(dim=-1, descending=True)
    if plan.top_k is not None:
        rank = torch.arange(scores.shape[1], device=scores.device)
        ordered = ordered.masked_fill(rank >= plan.top_k, -torch.inf)
    if plan.top_p is not None:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        drop = before >= plan.top_p
        drop[:, 0] = False
        ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(scores).scatter_(1, ids, ordered)


def _allowed(
    prompts: Sequence[EnginePrompt], vocabulary: int, device: torch.device
) -> Tensor | None:
    """[n or 1, V] bool, or None if every row allows all ids."""
    tables: dict[tuple[int, ...], int] = {}
    index = [tables.setdefault(tuple(prompt.allowed), len(tables)) for prompt in prompts]
    if set(tables) <= {()}:
        return None
    table = torch.zeros(len(tables), vocabulary, dtype=torch.bool)
    for allowed, row in tables.items():
        table[row, list(allowed) if allowed else slice(None)] = True
    table = table.to(device)
    return table if len(tables) == 1 else table[torch.tensor(index, device=device)]
