"""Which sequences begin with the same tokens. The model needs to read these tokens only once."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.trainer.sequences import Ints

SHARED = 16
"""Common beginnings count in multiples of so many tokens. So few sequences differ in how many
tokens they share, and those that share equally many are computed together."""


def reading_order(tokens: Sequence[Ints], shared: int = SHARED) -> list[tuple[int, int]]:
    """Sorts sequences so that those with a common beginning follow one another.

    Returns the index of each sequence in `tokens`, and how many of its first tokens the sequence
    before it has, too: a multiple of `shared`, and less than all.
    """
    order = sorted(range(len(tokens)), key=lambda index: tokens[index].astype(">i8").tobytes())
    found: list[tuple[int, int]] = []
    for index in order:
        known = _common(tokens[found[-1][0]], tokens[index]) if found else 0
        found.append((index, min(known, len(tokens[index]) - 1) // shared * shared))
    return found


def _common(one: Ints, another: Ints) -> int:
    length = min(len(one), len(another))
    different = one[:length] != another[:length]
    return int(different.argmax()) if different.any() else length
