"""Micro-batches: every sequence once, within the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.collate import pack


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 1000))
def test_micro_batches_hold_every_sequence_once_within_the_bound(
    lengths: list[int], max_tokens: int
) -> None:
    packed = pack(lengths, max_tokens)

    assert sorted(index for chosen in packed for index in chosen) == list(range(len(lengths)))
    for chosen in packed:
        padded = len(chosen) * max(lengths[index] for index in chosen)
        assert padded <= max_tokens or len(chosen) == 1
    assert packed == pack(lengths, max_tokens)
