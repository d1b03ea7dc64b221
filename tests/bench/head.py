"""Memory, time and gradients of the output head: in chunks, and with all logits as one tensor.

Random hidden states and a random head of Qwen3 0.6B's size, on one thread of a CPU. The plain way
is torch's own softmax with torch's own gradients. It needs no Kafka and no model. Linux only.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from headrace.services.models.output_head import Head
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.trainer.collate import Inputs
from headrace.trainer.forward.token_logprobs import token_logprobs
from tests.bench.report import Figure

TOKENS, VOCABULARY, WIDTH = 1_024, 151_936, 1_024
ROUNDS = 3
STATUS, PEAK, RESET_PEAK = Path("/proc/self/status"), "VmHWM", "5"
Values = tuple[Tensor, Tensor]
"""Logprobs [N] and entropies [N]."""


def one_softmax(logits: Tensor, inputs: Inputs) -> Values:
    """The numbers of `token_logprobs` from the whole tensor [N, V], by torch's own gradients."""
    scores = logits.float() / inputs.temperature
    if inputs.allowed is not None:
        scores = scores.masked_fill(~inputs.allowed[inputs.allowed_set], -torch.inf)
    logprobs = scores.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(-1)
    return logprobs.gather(1, inputs.targets.unsqueeze(1)).squeeze(1), entropies


@dataclass(frozen=True, slots=True)
class HeadCost:
    """One forward and backward pass through the head."""

    extra: int
    """The most bytes that were taken at once, without the gradients of weight and hidden states."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class HeadCosts:
    """Both ways, one after the other, and the largest difference of a gradient's value."""

    plain: HeadCost
    chunked: HeadCost
    difference: float


async def head_costs(cluster: ClusterConfig, scale: float) -> list[Figure]:
    """Figures at `scale` times as many tokens. `cluster` is not needed: there is no log in it."""
    tokens = max(1, round(TOKENS * scale))
    return await asyncio.to_thread(measure_head, tokens, VOCABULARY, WIDTH, ROUNDS)


def measure_head(tokens: int, vocabulary: int, width: int, rounds: int) -> list[Figure]:
    """Measures in processes of their own, in which nothing else takes memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        made = [pool.apply(compare_heads, (tokens, vocabulary, width)) for _ in range(rounds)]
    logits = tokens * vocabulary * 4
    shape = f"{tokens:,} tokens of {vocabulary:,} ids"
    ratios = sorted(one.chunked.cpu_s / one.plain.cpu_s for one in made)
    extra = {name: max(getattr(one, name).extra for one in made) for name in ("plain", "chunked")}
    cpu_s = {name: median(getattr(one, name).cpu_s for one in made) for name in extra}
    times = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return [
        Figure(
            f"memory of the head in chunks, {shape}",
            f"{extra['chunked'] / logits:.2f} of the logits' size",
            "1.3",
            note=f"all at once {extra['plain'] / logits:.2f}; gradients not counted",
        ),
        Figure(
            "the largest difference of a gradient's value",
            f"{max(one.difference for one in made):.1e}",
            "1e-05",
        ),
        Figure(
            "CPU time of the head in chunks / all at once",
            f"{median(ratios):.2f}",
            "1.4",
            note=f"{times}; {cpu_s['chunked']:.1f} and {cpu_s['plain']:.1f} s",
        ),
    ]


def compare_heads(tokens: int, vocabulary: int, width: int) -> HeadCosts:
    """Runs both ways on the same values, and each once before on a few tokens."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(width, vocabulary, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5, generator=draw)
    head = Head(layer, vocabulary, [layer.weight], linear=True)

    def plain(hidden: Tensor, inputs: Inputs) -> Values:
        return one_softmax(layer(hidden), inputs)

    def chunked(hidden: Tensor, inputs: Inputs) -> Values:
        return token_logprobs(hidden, inputs, head)

    hidden = 2 * torch.randn((tokens, width), generator=draw)
    inputs = _inputs(torch.randint(vocabulary, (tokens,), generator=draw))
    costs = []
    found: list[tuple[Tensor, ...]] = []
    for way in (plain, chunked):
        few = _inputs(inputs.targets[:8])
        _gradients(way, hidden[:8], few, layer.weight)
        cost, gradients = _measure(way, hidden, inputs, layer.weight)
        costs.append(cost)
        found.append(gradients)
    difference = max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))
    return HeadCosts(costs[0], costs[1], difference)


def _measure(
    way: Callable[[Tensor, Inputs], Values], hidden: Tensor, inputs: Inputs, weight: Tensor
) -> tuple[HeadCost, tuple[Tensor, ...]]:
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    began = time.process_time()
    gradients = _gradients(way, hidden, inputs, weight)
    cpu_s = time.process_time() - began
    kept = sum(one.numel() * one.element_size() for one in gradients)
    return HeadCost(_status(PEAK) - before - kept, cpu_s), gradients


def _gradients(
    way: Callable[[Tensor, Inputs], Values], hidden: Tensor, inputs: Inputs, weight: Tensor
) -> tuple[Tensor, ...]:
    """The gradients by the hidden states and the weight, of a loss like that of a trainer."""
    leaf = hidden.clone().requires_grad_()
    logprobs, entropies = way(leaf, inputs)
    signs = 1 - 2 * (torch.arange(len(leaf)) % 2)
    loss = (logprobs * signs + 0.01 * entropies).mean()
    return torch.autograd.grad(loss, (leaf, weight))


def _inputs(targets: Tensor) -> Inputs:
    """What the head reads of a micro-batch: temperature 0.7, and no masks."""
    empty = targets[:0]
    return Inputs(
        ids=empty, rows=empty, before=empty, targets=targets,
        temperature=torch.full((len(targets), 1), 0.7), allowed=None,
        allowed_set=torch.zeros_like(targets), behaviour=empty, advantages=empty,
        sampled=empty, demonstrated=empty,
    )  # fmt: skip


def _status(name: str) -> int:
    """A value of this process's memory, in bytes."""
    [line] = [one for one in STATUS.read_text().splitlines() if one.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
