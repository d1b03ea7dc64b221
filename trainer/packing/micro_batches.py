"""Divides the sequences of an update into micro-batches, and these among ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.trainer.packing.shared_prefixes import reading_order
from headrace.trainer.sequences import Ints

SEEN = 8
"""The lengths of a micro-batch's sequences add up to at most so many times `max_tokens`. Attention
may gather the keys of each of them, also those that several sequences share."""


@dataclass(frozen=True, slots=True)
class Packer:
    """Knows how a model reads the sequences of a micro-batch, and so what they cost."""

    ranks: int
    width: int
    """Of the model's hidden states."""
    packed: bool
    """Whether the model reads sequences one after the other, and what they share only once.
    Otherwise they are rows that are padded to the longest one."""

    def divide(self, tokens: Sequence[Ints], max_tokens: int) -> list[list[list[int]]]:
        """Returns the micro-batches of each rank: [ranks][M] lists of indices into `tokens`.

        All ranks have equally many, of which some may be empty, because they must run the model
        equally often. Those that run at the same time have similar costs. A micro-batch has at most
        `max_tokens` tokens, unless a single sequence is longer.

        Sequences with a common beginning stay together, unless that leaves other ranks without
        work: of several ways to split them, the one that takes the least time is taken.
        """
        limit = max_tokens
        options = [self._together(tokens, limit)]
        while self.ranks > 1 and any(len(one) > 1 for one in options[-1]):
            limit //= 2
            options.append(self._together(tokens, limit))
        return min((self._shares(tokens, items, max_tokens) for items in options), key=_time)[1]

    def _shares(
        self, tokens: Sequence[Ints], items: Sequence[Sequence[int]], max_tokens: int
    ) -> tuple[float, list[list[list[int]]]]:
        """Divides lists of sequences that stay together. Returns also the time that it takes."""
        members = [[tokens[index] for index in one] for one in items]
        costs = [self._cost(one) for one in members]
        # Nothing can be added to rows that are padded to one length.
        sizes = [self.size(one) if self.packed else max_tokens for one in members]
        shares = divide(sizes, self.ranks, max_tokens, costs)
        steps = zip(*shares, strict=True)
        time = sum(max(sum(costs[item] for item in one) for one in step) for step in steps)
        return time, [
            [[index for item in one for index in items[item]] for one in share] for share in shares
        ]

    def size(self, tokens: Sequence[Ints]) -> int:
        """Returns the tokens of a micro-batch of these sequences, padding included.

        Sequences that share most of their tokens count for more than what is read (`SEEN`).
        """
        if self.packed or not tokens:
            return max(self.read(tokens), -(-sum(map(len, tokens)) // SEEN))
        return len(tokens) * max(map(len, tokens))

    def read(self, tokens: Sequence[Ints]) -> int:
        """Returns how many tokens the model reads of these sequences, without padding."""
        if not self.packed:
            return sum(map(len, tokens))
        return sum(len(tokens[index]) - known for index, known in reading_order(tokens))

    def _together(self, tokens: Sequence[Ints], limit: int) -> list[list[int]]:
        """Returns lists of sequences that belong in one micro-batch, of at most `limit` tokens."""
        if not self.packed:
            return rows([len(one) for one in tokens], limit)
        found: list[list[int]] = []
        size = seen = 0
        for index, known in reading_order(tokens):
            length = len(tokens[index])
            fits = size + length - known <= limit and seen + length <= SEEN * limit
            if known and fits:
                found[-1].append(index)
                size, seen = size + length - known, seen + length
            else:
                found.append([index])
                size = seen = length
        return found

    def _cost(self, tokens: Sequence[Ints]) -> float:
        if not self.packed:
            return len(tokens) * cost(max(map(len, tokens)), self.width)
        return sum(
            cost(len(tokens[index]), self.width) - cost(known, self.width)
            for index, known in reading_order(tokens)
        )


def _time(found: tuple[float, list[list[list[int]]]]) -> float:
    return found[0]


def rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Divides sequences of these lengths into lists of indices, longest first.

    R sequences that are padded to their longest one have R times its length tokens. That is at most
    `most`, unless a single sequence is longer.
    """
    found: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if found and (len(found[-1]) + 1) * longest <= most:
            found[-1].append(index)
        else:
            found.append([index])
            longest = lengths[index]
    return found


def divide(
    sizes: Sequence[int], ranks: int, max_tokens: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Divides items of these sizes, in tokens: [ranks][M] lists of their indices.

    A list has at most `max_tokens` tokens, unless a single item is larger. The costliest item goes
    first, always to the cheapest list that has room. The costs are the sizes if they are left out.
    """
    costs = sizes if costs is None else costs
    order = sorted(range(len(sizes)), key=lambda index: (-costs[index], index))
    tokens = sum(min(size, max_tokens) for size in sizes)
    large = sum(2 * size > max_tokens for size in sizes)  # No two of them fit into one list.
    steps = max(1, -(-tokens // (max_tokens * ranks)), -(-large // ranks))
    most = max(1, -(-len(sizes) // ranks))
    while (bins := _fill(sizes, costs, order, steps * ranks, max_tokens)) is None:
        steps = min(most, steps + max(1, steps // 16))
    # Neighbours have similar costs, so those of one step do.
    bins.sort(key=lambda one: (-sum(costs[index] for index in one), one))
    return [bins[rank::ranks] for rank in range(ranks)]


def _fill(
    sizes: Sequence[int],
    costs: Sequence[float],
    order: Sequence[int],
    count: int,
    max_tokens: int,
) -> list[list[int]] | None:
    """Puts each item into the cheapest of `count` bins with room. Returns None if one has none."""
    bins: list[list[int]] = [[] for _ in range(count)]
    full, load = np.zeros(count, dtype=np.int64), np.zeros(count)
    for index in order:
        room = (full == 0) | (full + sizes[index] <= max_tokens)
        if not room.any():
            return None
        cheapest = int(np.where(room, load, np.inf).argmin())
        bins[cheapest].append(index)
        full[cheapest] += sizes[index]
        load[cheapest] += costs[index]
    return bins


def cost(length: int, width: int) -> float:
    """Returns what a sequence of so many tokens costs, in tokens without attention.

    A layer of a transformer of width H takes 24 H^2 operations for a token, and attention over L
    tokens takes 4 H L more ("Scaling Laws for Neural Language Models", arXiv 2001.08361, table 1).
    """
    return length * (1 + length / (6 * width))
