"""Divides an update among ranks: which micro-batches each of them computes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from headrace.trainer.collate import pack


def plan(
    lengths: Sequence[int], ranks: int, max_tokens: int, width: int = 1024
) -> list[list[list[int]]]:
    """Returns the micro-batches of each rank: lists of indices into `lengths`, longest first.

    `lengths` are numbers of tokens, and `width` is that of the model's hidden states. The costliest
    sequence goes first, always to the rank with the least to do. So the most that a rank has to do
    exceeds the mean by less than one sequence. One rank has the micro-batches of `pack`.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + cost(lengths[index], width), rank))
    return [
        [
            [share[index] for index in chosen]
            for chosen in pack([lengths[i] for i in share], max_tokens)
        ]
        for share in map(sorted, shares)
    ]


def cost(length: int, width: int) -> float:
    """Returns what a sequence of so many tokens costs, in tokens without attention.

    A layer of a transformer of width H takes 24 H^2 operations for a token, and attention over L
    tokens takes 4 H L more ("Scaling Laws for Neural Language Models", arXiv 2001.08361, table 1).
    """
    return length * (1 + length / (6 * width))
