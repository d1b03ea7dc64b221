"""Where the tokens of a micro-batch are in what the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.trainer.packing.shared_prefixes import SHARED, reading_order
from headrace.trainer.sequences import Ints


class Piece(NamedTuple):
    """The tokens of a sequence that are read for it: all but those that it shares."""

    sequence: int
    first: int
    """The position of its first token in the sequence. The tokens before are shared."""
    length: int


class Layout(NamedTuple):
    """Sequences of a micro-batch one after the other: T tokens without padding."""

    ids: Ints
    """[T] int64: token ids."""
    positions: Ints
    """[T] int64: the position of each token in its sequence."""
    places: list[Ints]
    """For each sequence of L tokens, [L] int64: where each of them is among the T."""
    pieces: list[Piece]
    """In the order of the T tokens: by `first`, then longest first."""


def packed(tokens: Sequence[Ints], shared: int = SHARED) -> Layout:
    """Lays out sequences without padding. A beginning that several have is there once.

    Under a causal mask what the model computes at a token follows from the tokens before it in its
    sequence, so it is the same for all sequences that have these tokens.
    """
    order = reading_order(tokens, shared)
    pieces = sorted(
        (Piece(index, known, len(tokens[index]) - known) for index, known in order),
        key=lambda piece: (piece.first, -piece.length, piece.sequence),
    )
    ends = np.cumsum([piece.length for piece in pieces])
    own = {
        piece.sequence: np.arange(end - piece.length, end)
        for piece, end in zip(pieces, ends, strict=True)
    }
    places: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(tokens)
    before = places[0]
    for index, known in order:
        before = places[index] = np.concatenate([before[:known], own[index]])
    return Layout(
        np.concatenate([tokens[index][first:] for index, first, _ in pieces]),
        np.concatenate([np.arange(first, first + length) for _, first, length in pieces]),
        places,
        pieces,
    )


def padded(tokens: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
    """Lays out R sequences as rows [R, L], padded on the right with 0.

    Returns also the places of each sequence's tokens among the R * L numbers. Under a causal mask
    no token sees padding.
    """
    longest = max(map(len, tokens))
    ids = np.zeros((len(tokens), longest), dtype=np.int64)
    for row, one in zip(ids, tokens, strict=True):
        row[: len(one)] = one
    return ids, [row * longest + np.arange(len(one)) for row, one in enumerate(tokens)]
