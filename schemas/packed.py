"""Packed arrays: little-endian `bytes`, 35 to 90 times faster to encode than Avro arrays.

i32[] and f32[] are contiguous values of 4 bytes. A `spans` field is an i32[] of pairs (index of the
first token, policy version), one pair for each run of tokens that have the same version. The
indices ascend, and the first one is 0.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[float]) -> bytes:
    packed = array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes) -> list[Any]:
    if not data:
        return []
    if len(data) % 4:
        raise ValueError(f"a packed array has {len(data)} bytes, not a multiple of 4")
    values = array(code)
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return values.tolist()


def pack_i32(values: Iterable[int]) -> bytes:
    """Packs int32 values. Raises OverflowError if one does not fit into 32 bits."""
    return _pack("i", values)


def unpack_i32(data: bytes) -> list[int]:
    """Returns the ints of an i32[]. Raises ValueError if the length is not a multiple of 4."""
    return _unpack("i", data)


def pack_f32(values: Iterable[float]) -> bytes:
    """Packs floats as IEEE binary32, which is exact for values that were computed in float32."""
    return _pack("f", values)


def unpack_f32(data: bytes) -> list[float]:
    """Returns the floats of an f32[]. Raises ValueError if the length is not a multiple of 4."""
    return _unpack("f", data)


def count(data: bytes) -> int:
    """Returns how many values a packed array holds."""
    return len(data) // 4


def pack_spans(versions: Sequence[int]) -> bytes:
    """Packs the version of each token into spans: one pair for each change of the version."""
    pairs: list[int] = []
    for index, version in enumerate(versions):
        if index == 0 or version != versions[index - 1]:
            pairs += (index, version)
    return pack_i32(pairs)


def span_runs(data: bytes, tokens: int) -> list[tuple[int, int]]:
    """Returns (version, number of tokens) for each run of tokens that have the same version.

    Raises ValueError if the spans don't cover `tokens` tokens.
    """
    flat = unpack_i32(data)
    if not tokens and not flat:
        return []
    starts, versions = flat[::2], flat[1::2]
    if len(flat) % 2 or not starts or starts[0] != 0 or sorted(set(starts)) != starts:
        raise ValueError(f"{flat} are not spans: pairs with ascending first indices, from 0")
    if starts[-1] >= tokens:
        raise ValueError(f"spans start at token {starts[-1]}, but there are {tokens} tokens")
    ends = [*starts[1:], tokens]
    return [
        (version, end - start) for version, start, end in zip(versions, starts, ends, strict=True)
    ]


def unpack_spans(data: bytes, tokens: int) -> list[int]:
    """Returns the version of each of `tokens` tokens. Raises ValueError as `span_runs` does."""
    return [version for version, run in span_runs(data, tokens) for _ in range(run)]


def oldest(data: bytes) -> int | None:
    """Returns the oldest version in a spans field, or None if the field is empty."""
    return min(unpack_i32(data)[1::2], default=None)
