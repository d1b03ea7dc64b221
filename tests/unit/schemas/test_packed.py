"""Packed arrays and spans."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.packed import (
    count,
    oldest,
    pack_f32,
    pack_i32,
    pack_spans,
    unpack_f32,
    unpack_i32,
    unpack_spans,
)

I32 = st.integers(-(2**31), 2**31 - 1)


@given(values=st.lists(I32))
def test_ints_are_little_endian_and_return(values: list[int]) -> None:
    data = pack_i32(values)
    assert data == struct.pack(f"<{len(values)}i", *values)
    assert unpack_i32(data) == values
    assert count(data) == len(values)


@given(values=st.lists(st.floats(width=32, allow_nan=False)))
def test_float32_values_are_exact(values: list[float]) -> None:
    data = pack_f32(values)
    assert data == struct.pack(f"<{len(values)}f", *values)
    assert unpack_f32(data) == values


def test_an_int_beyond_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_i32([2**31])


@pytest.mark.parametrize("unpack", [unpack_i32, unpack_f32, lambda data: unpack_spans(data, 1)])
def test_a_cut_array_is_refused(unpack: Callable[[bytes], object]) -> None:
    with pytest.raises(ValueError, match="5 bytes, not a multiple of 4"):
        unpack(b"12345")


@given(versions=st.lists(st.integers(0, 3)))
def test_spans_give_the_versions_back(versions: list[int]) -> None:
    data = pack_spans(versions)
    assert unpack_spans(data, len(versions)) == versions
    assert oldest(data) == min(versions, default=None)
    changes = sum(1 for left, right in pairwise(versions) if left != right)
    assert count(data) == (2 * (changes + 1) if versions else 0)


@pytest.mark.parametrize(
    ("flat", "tokens"),
    [
        ([], 1),
        ([0], 1),
        ([0, 5, 1], 2),
        ([1, 5], 2),
        ([0, 5, 0, 6], 2),
        ([0, 5, 3, 6, 2, 7], 9),
        ([0, 5], 0),
        ([0, 5, 2, 6], 2),
        ([-1, 5, 0, 6], 2),
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_refused(flat: list[int], tokens: int) -> None:
    with pytest.raises(ValueError, match="span"):
        unpack_spans(pack_i32(flat), tokens)
