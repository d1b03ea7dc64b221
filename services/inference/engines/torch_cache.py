"""The KV cache: one static block a layer, [rows, heads, length, dim], grown by doubling.

Row r holds the keys and values of its sequence's positions 0..; what lies beyond its length is
masked by the reader, and overwritten later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


@dataclass(slots=True)
class Place:
    """Where the forward under way reads and writes in the cache."""

    first: int = 0
    """Prompts: the row of the first of them; -1 keeps nothing."""
    rows: Tensor | None = None
    """Steps: [n] row indices; None while prompts are read."""
    positions: Tensor | None = None
    """Steps: [n] where each row's key and value go."""
    length: int = 0
    """Positions that a step sees."""


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, [rows, heads, length, dim]."""

    def __init__(self, place: Place) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the blocks, like the first keys and values."""
        self.keys = _grown(None, key_states, 0, 0)
        self.values = _grown(None, value_states, 0, 0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, and returns those that the attention reads."""
        place = self._place
        if place.rows is None and place.first < 0:
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if place.rows is None:
            last, length = place.first + key_states.shape[0], key_states.shape[2]
            self.keys = _grown(self.keys, key_states, last, length)
            self.values = _grown(self.values, value_states, last, length)
            self.keys[place.first : last, :, :length] = key_states
            self.values[place.first : last, :, :length] = value_states
            return key_states, value_states
        count = key_states.shape[0]
        self.keys = _grown(self.keys, key_states, count, place.length)
        self.values = _grown(self.values, value_states, count, place.length)
        self.keys[place.rows, :, place.positions] = key_states.squeeze(2)
        self.values[place.rows, :, place.positions] = value_states.squeeze(2)
        return self.keys[:count, :, : place.length], self.values[:count, :, : place.length]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies rows onto others."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys[targets] = self.keys[sources]
            self.values[targets] = self.values[sources]

    def clear(self, rows: Tensor) -> None:
        """Zeroes rows that may hold NaN: even masked, it would spoil who has the row next."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys[rows] = 0
            self.values[rows] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Asked while prompts are read: they see themselves alone."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Returns 0: the positions of a prompt begin there, and a step passes its own."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1, for no limit: the blocks grow."""
        return -1


def _grown(block: Tensor | None, like: Tensor, rows: int, length: int) -> Tensor:
    """The block with room for `rows` and `length`, each doubled until it is enough.

    Zeros, never uninitialised memory: even masked, a NaN spoils the weighted sum.
    """
    if block is None:
        return like.new_zeros(0, like.shape[1], 0, like.shape[3])
    if block.shape[0] >= rows and block.shape[2] >= length:
        return block
    size = [_doubled(block.shape[0], rows), _doubled(block.shape[2], length)]
    grown = block.new_zeros(size[0], block.shape[1], size[1], block.shape[3])
    grown[: block.shape[0], :, : block.shape[2]] = block
    return grown


def _doubled(size: int, need: int) -> int:
    size = max(size, 16)
    while size < need:
        size *= 2
    return size
