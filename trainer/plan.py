"""Who trains on what, and in which micro-batches. Pure: every rank computes the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.schemas.events import BatchAssembled


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update of a batch."""

    tokens: int
    """Trainable tokens of all its samples, on all ranks: the loss's denominator."""
    ranks: tuple[tuple[int, ...], ...]
    """Of each rank: indices into the batch's samples."""


def plan(batch: BatchAssembled, ranks: int, updates: int) -> tuple[Update, ...]:
    """Shares a batch's samples out over updates, then over ranks.

    Sample i belongs to update i modulo `updates`: a group's samples, which lie side by side, are
    spread evenly. Within an update the longest samples go first, each to the rank with the fewest
    tokens. An update without trainable tokens is left out.
    """
    result = []
    for number in range(updates):
        chosen = range(number, len(batch.samples), updates)
        tokens = sum(batch.samples[index].tokens for index in chosen)
        if tokens:
            result.append(Update(tokens, _balance(batch, chosen, ranks)))
    return tuple(result)


def _balance(
    batch: BatchAssembled, chosen: Sequence[int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(chosen, key=lambda index: (-batch.samples[index].longest, index)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        shares[rank].append(index)
        load[rank] += batch.samples[index].longest
    return tuple(tuple(sorted(share)) for share in shares)


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cuts sequences of these lengths into micro-batches: lists of indices, longest first.

    A micro-batch takes rows x its longest length tokens, padding included: at most `max_tokens`,
    unless a single sequence is longer than that already.
    """
    micro_batches: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if micro_batches and (len(micro_batches[-1]) + 1) * longest <= max_tokens:
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
            longest = lengths[index]
    return micro_batches
