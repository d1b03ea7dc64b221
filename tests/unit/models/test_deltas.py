"""Deltas: applied, they give the very bits; what is none is refused."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from headrace.errors import BlobError
from headrace.services.models import deltas
from headrace.services.models.weights import DTYPE_BYTES, weights_digest

ENOUGH = 1 << 30


def container(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(d for _, _, d in tensors.values())


def applied(before: bytes, *chain: bytes) -> bytes:
    with TemporaryDirectory() as folder:
        weights, delta = Path(folder) / "weights", Path(folder) / "delta"
        weights.write_bytes(before)
        for one in chain:
            delta.write_bytes(one)
            deltas.apply(weights, delta)
        return weights.read_bytes()


def delta_of(before: bytes, after: bytes) -> bytes:
    made = deltas.diff(before, after, ENOUGH)
    assert made is not None
    return made


@st.composite
def versions(draw: st.DrawFn, count: int) -> list[bytes]:
    """Versions of the same tensors, each of any dtype and of any bits, NaNs and -0.0 among them."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.integers(0, 700)), max_size=4)
    )
    seed, share = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from([0, 0.003, 0.1, 1]))
    rng = np.random.default_rng(seed)
    now = [rng.bytes(elements * DTYPE_BYTES[dtype]) for dtype, elements in kinds]
    made = []
    for _ in range(count):
        tensors = {
            f"layer/{i}": (dtype, [n], data)
            for i, ((dtype, n), data) in enumerate(zip(kinds, now, strict=True))
        }
        made.append(container(tensors))
        now = [bytes(_changed(data, share, rng)) for data in now]
    return made


def _changed(data: bytes, share: float, rng: np.random.Generator) -> bytearray:
    new = bytearray(data)
    for at in np.flatnonzero(rng.random(len(data)) < share):
        new[at] ^= int(rng.integers(1, 256))
    return new


@settings(deadline=None)
@given(versions(count=2))
def test_what_is_applied_gives_the_very_bits(pair: list[bytes]) -> None:
    before, after = pair
    assert applied(before, delta_of(before, after)) == after


@settings(deadline=None, max_examples=30)
@given(versions(count=5))
def test_a_chain_gives_the_last_and_a_gap_does_not(chain: list[bytes]) -> None:
    links = [delta_of(a, b) for a, b in pairwise(chain)]
    assert applied(chain[0], *links) == chain[-1]
    torn = applied(chain[0], *links[1:])
    assert torn == chain[-1] or weights_digest(torn) != weights_digest(chain[-1])


@pytest.mark.parametrize("bits", [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0])
def test_a_nan_keeps_its_payload_and_a_zero_its_sign(bits: int) -> None:
    before = container({"a": ("F32", [2], struct.pack("<If", 0, 1.0))})
    after = container({"a": ("F32", [2], struct.pack("<If", bits, 1.0))})
    assert applied(before, delta_of(before, after)) == after


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 3000])
def test_gaps_of_every_length(gap: int) -> None:
    old = np.zeros(20_000, dtype=np.uint16)
    new = old.copy()
    new[[gap, 2 * gap + 1, 19_999]] = 7
    before, after = save({"a": old}), save({"a": new})
    made = delta_of(before, after)
    assert b"gaps/a" in made
    assert applied(before, made) == after


def test_layouts_may_differ_and_what_is_unchanged_is_left_out() -> None:
    a, b = ("U8", [4], b"same"), ("F16", [2], b"\1\2\3\4")
    before = container({"a": a, "b": b})
    after = container({"b": ("F16", [2], b"\1\2\3\5"), "a": a})
    made = delta_of(before, after)
    assert b"/a" not in made
    assert weights_digest(applied(before, made)) == weights_digest(after)


@pytest.mark.parametrize(
    "other",
    [
        {"a": ("F32", [2], bytes(8)), "c": ("U8", [1], b"x")},
        {"a": ("F32", [1, 2], bytes(8)), "b": ("U8", [1], b"x")},
        {"a": ("I32", [2], bytes(8)), "b": ("U8", [1], b"x")},
        {"a": ("F32", [2], bytes(8))},
    ],
)
def test_other_tensors_have_no_delta(other: dict[str, tuple[str, list[int], bytes]]) -> None:
    before = container({"a": ("F32", [2], bytes(8)), "b": ("U8", [1], b"x")})
    assert deltas.diff(before, container(other), ENOUGH) is None


@given(st.integers(0, 4000), st.floats(0, 1))
@settings(deadline=None)
def test_what_is_made_is_smaller_than_its_limit(limit: int, share: float) -> None:
    rng = np.random.default_rng(limit)
    old = rng.integers(0, 9, 1000, dtype=np.uint16)
    new = np.where(rng.random(1000) < share, old + 1, old).astype(np.uint16)
    before, after = save({"a": old}), save({"a": new})
    made, whole = deltas.diff(before, after, limit), delta_of(before, after)
    assert (made is None) == (len(whole) >= limit)
    assert made in (None, whole)


WEIGHTS = container({"a": ("BF16", [2, 5], bytes(20)), "b": ("F32", [1], bytes(4))})
TWO = ("BF16", [2], b"\1\2\3\4")


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        ({"values/a": TWO, "gaps/a": ("U8", [2], bytes([0, 9]))}, "beyond its 10"),
        ({"values/a": TWO, "gaps/a": ("U8", [3], bytes([0, 0, 255]))}, "beyond its 10"),
        ({"values/a": TWO, "gaps/a": ("U8", [2], bytes([255, 0]))}, "beyond its 10"),
        ({"values/a": TWO, "gaps/a": ("U8", [3], bytes([0, 0, 0]))}, "for 3 positions"),
        ({"values/a": TWO, "gaps/a": ("U8", [1], bytes([0]))}, "for 1 positions"),
        ({"values/a": TWO, "gaps/a": ("I8", [2], bytes([0, 0]))}, "in dtype U8"),
        ({"values/a": TWO, "mask/a": ("U8", [2], bytes([3, 4]))}, "not have 10 bits"),
        ({"values/a": TWO, "mask/a": ("U8", [3], bytes([3, 0, 0]))}, "not have 10 bits"),
        ({"values/a": TWO, "mask/a": ("U8", [2], bytes([7, 0]))}, "for 3 positions"),
        (
            {"values/a": TWO, "gaps/a": ("U8", [2], bytes(2)), "mask/a": ("U8", [2], b"\3\0")},
            "needs either gaps or a mask",
        ),
        ({"values/a": TWO}, "needs either gaps or a mask"),
        ({"gaps/a": ("U8", [1], b"\0")}, "has no values"),
        ({"values/a": ("F16", [1], b"\1\2"), "gaps/a": ("U8", [1], b"\0")}, "the tensor is BF16"),
        ({"values/a": ("BF16", [1, 1], b"\1\2"), "gaps/a": ("U8", [1], b"\0")}, "has shape"),
        ({"values/c": TWO, "gaps/c": ("U8", [2], bytes(2))}, "have no tensor"),
        ({"a": ("BF16", [2, 5], bytes(20))}, "have no tensor"),
    ],
)
def test_what_is_no_delta_of_these_weights_is_refused(
    delta: dict[str, tuple[str, list[int], bytes]], reason: str
) -> None:
    with pytest.raises(BlobError, match=reason):
        applied(WEIGHTS, container(delta))


@given(st.binary(max_size=200), st.integers(0, 199))
def test_damaged_bytes_are_refused_or_do_no_more_than_other_values(junk: bytes, at: int) -> None:
    good = delta_of(
        WEIGHTS, container({"a": ("BF16", [2, 5], b"x" * 20), "b": ("F32", [1], b"1234")})
    )
    for bad in (junk, good[: at % len(good)] + junk + good[at % len(good) + len(junk) :]):
        try:
            assert len(applied(WEIGHTS, bad)) == len(WEIGHTS)
        except BlobError:
            continue
