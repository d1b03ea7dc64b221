"""The KV cache: one static block for each layer, [rows, heads, length, dim], grown by doubling.

Row r holds the keys and values of its sequence from position 0 on. Readers mask what is beyond the
length of the sequence, and later positions overwrite it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


@dataclass(slots=True)
class CacheTarget:
    """The part of the cache that the current forward pass reads and writes."""

    first: int = 0
    """For prompts: the row of the first prompt; -1 keeps nothing."""
    rows: Tensor | None = None
    """For decoding: [n] row indices; None while prompts are read."""
    positions: Tensor | None = None
    """For decoding: [n] the position of each row's new key and value."""
    length: int = 0
    """For decoding: the number of positions that the step attends to."""


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, [rows, heads, length, dim]."""

    def __init__(self, target: CacheTarget) -> None:
        super().__init__()
        self._target = target

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes empty blocks, like the first keys and values."""
        self.keys, self.values = (
            like.new_zeros(0, like.shape[1], 0, like.shape[3])
            for like in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, and returns those that the attention reads."""
        target = self._target
        if target.rows is None and target.first < 0:
            return key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        self.keys, keys = _stored(self.keys, key_states, target)
        self.values, values = _stored(self.values, value_states, target)
        return keys, values

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the rows `sources` to the rows `targets`."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys[targets] = self.keys[sources]
            self.values[targets] = self.values[sources]

    def clear(self, rows: Tensor) -> None:
        """Zeroes rows that may hold NaN. Even masked, NaN would reach the row's next sequence."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys[rows] = 0
            self.values[rows] = 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Called while prompts are read. A prompt attends only to itself."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Returns 0: the positions of a prompt begin there, and a step passes its own."""
        return 0

    def get_max_length(self) -> int:
        """Returns -1, for no limit: the blocks grow."""
        return -1


def _stored(block: Tensor, new: Tensor, target: CacheTarget) -> tuple[Tensor, Tensor]:
    """Returns the block with new keys or values in it, and those that the attention reads."""
    count = new.shape[0]
    if target.rows is None:
        last, length = target.first + count, new.shape[2]
        block = _grown(block, last, length)
        block[target.first : last, :, :length] = new
        return block, new
    block = _grown(block, count, target.length)
    block[target.rows, :, target.positions] = new.squeeze(2)
    return block, block[:count, :, : target.length]


def _grown(block: Tensor, rows: int, length: int) -> Tensor:
    """Returns the block with room for `rows` and `length`, each doubled until it suffices.

    New memory is zeroed: even masked, a NaN would reach the weighted sum.
    """
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
