"""Decides which sequences each update of a fine-tuning learns, and which are held out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random


@dataclass(frozen=True, slots=True)
class SftPlan:
    """The updates in their order. Sequences are named by their indices."""

    epochs: tuple[tuple[tuple[int, ...], ...], ...]
    """The updates of each epoch. An epoch has each sequence once, in an order of its own."""
    measured: tuple[tuple[int, ...], ...]
    """The sequences that are never learned, in parts that are measured one after the other."""

    @property
    def held_out(self) -> list[int]:
        """The sequences that are never learned, ascending."""
        return [index for part in self.measured for index in part]

    @property
    def updates(self) -> list[tuple[int, ...]]:
        """The sequences of each update, over all epochs."""
        return [update for epoch in self.epochs for update in epoch]

    @property
    def epoch_ends(self) -> list[int]:
        """The numbers of updates after which an epoch ends."""
        return list(accumulate(map(len, self.epochs)))


def make_plan(
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    epochs: int,
    batch_tokens: int,
    held_out: float,
    seed: int,
) -> SftPlan:
    """Returns the plan for sequences of these lengths, in tokens. It follows from its arguments.

    Sequences of the same group are held out together, so nothing of an item is both learned and
    measured. `held_out` is the part of the groups that are held out: at least one if it is above 0,
    and never all. An update, and a part that is measured, has at most `batch_tokens` tokens, or one
    sequence.
    """
    numbers = sorted(set(groups))
    count = max(1, round(held_out * len(numbers))) if held_out else 0
    chosen = set(Random(f"held out {seed}").sample(numbers, min(count, len(numbers) - 1)))
    kept = [index for index, group in enumerate(groups) if group not in chosen]
    return SftPlan(
        tuple(
            _updates(lengths, _shuffled(kept, seed, epoch), batch_tokens) for epoch in range(epochs)
        ),
        _updates(lengths, [i for i, group in enumerate(groups) if group in chosen], batch_tokens),
    )


def _shuffled(indices: Sequence[int], seed: int, epoch: int) -> list[int]:
    shuffled = list(indices)
    Random(f"epoch {epoch} of {seed}").shuffle(shuffled)
    return shuffled


def _updates(
    lengths: Sequence[int], indices: Sequence[int], batch_tokens: int
) -> tuple[tuple[int, ...], ...]:
    updates: list[list[int]] = []
    room = 0
    for index in indices:
        if not updates or lengths[index] > room:
            updates.append([])
            room = batch_tokens
        updates[-1].append(index)
        room -= lengths[index]
    return tuple(map(tuple, updates))
