"""Weight deltas: what makes one version's weights of another's, bit by bit.

A delta is a safetensors file. Of each tensor NAME that has changed it holds

- `values/NAME`: the new values in the tensor's own dtype, shape [n], in the order of positions;
- `gaps/NAME` (U8): how many elements lie between one changed element and the next, a byte each;
  255 stands for 255 unchanged elements and no changed one. Or, where that is smaller,
- `mask/NAME` (U8): a bit an element, the lowest bit of a byte first, 1 where it has changed.

Positions so written ascend: none can occur twice. Elements are compared and copied as bits, so
that NaNs keep their payload and zeros their sign. All functions block.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BlobError
from headrace.services.models.weights import DTYPE_BYTES, TensorEntry, read_header

Bytes = NDArray[np.uint8]

GAP = 255
"""The byte that stands for as many unchanged elements, and no changed one."""
BITS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
"""How an element of so many bytes is read."""


def diff(before: bytes, after: bytes, limit: int) -> bytes | None:
    """The delta that makes `after` of `before`, two safetensors files.

    None where their tensors differ in name, dtype or shape, or the delta would not be smaller than
    `limit` bytes.
    """
    old, new = (read_header(io.BytesIO(data), "in memory") for data in (before, after))
    if [_kind(entry) for entry in old] != [_kind(entry) for entry in new]:
        return None
    parts: dict[str, tuple[str, bytes]] = {}
    size = 0
    for was, entry in zip(old, new, strict=True):
        a, b = _elements(before, was), _elements(after, entry)
        changed = a != b
        count = int(np.count_nonzero(changed))
        if not count:
            continue
        # At least this much, before positions of eight bytes each are made of it.
        if size + count * b.itemsize + min(count, len(b) // 8) >= limit:
            return None
        kind, places = _encode(changed)
        parts[f"{kind}/{entry.name}"] = ("U8", places)
        parts[f"values/{entry.name}"] = (entry.dtype, b[changed].tobytes())
        size += len(places) + count * b.itemsize
    delta = _container(parts)
    return delta if len(delta) < limit else None


def apply(weights: Path, delta: Path) -> None:
    """Changes a safetensors file in place.

    BlobError where the delta is not sound, or not one of these weights: the file is spoilt then.
    """
    try:
        with weights.open("rb") as file:
            targets = {entry.name: entry for entry in read_header(file, str(weights))}
        with delta.open("rb") as file:
            parts = {entry.name: entry for entry in read_header(file, str(delta))}
        if not parts:
            return
        source = np.memmap(delta, dtype=np.uint8, mode="r")
        target = np.memmap(weights, dtype=np.uint8, mode="r+")
    except OSError as error:
        raise BlobError(f"can't apply {delta} to {weights}: {error}") from error
    for name, values in parts.items():
        kind, _, tensor = name.partition("/")
        if kind in ("gaps", "mask"):
            if f"values/{tensor}" not in parts:
                raise _unsound(delta, f"{name!r} has no values")
            continue
        entry = targets.get(tensor)
        if kind != "values" or entry is None:
            raise _unsound(delta, f"{name!r} is of no tensor of the weights")
        if values.dtype != entry.dtype:
            raise _unsound(delta, f"{name!r} is {values.dtype}, the tensor {entry.dtype}")
        places = _places(delta, tensor, parts, source, prod(entry.shape))
        if values.shape != (len(places),):
            raise _unsound(delta, f"{name!r} has shape {values.shape} for {len(places)} positions")
        _elements(target, entry)[places] = _elements(source, values)
    target.flush()


def _places(
    delta: Path, tensor: str, parts: Mapping[str, TensorEntry], source: Bytes, elements: int
) -> NDArray[np.int64]:
    """The positions of a tensor's changed elements, ascending and within it."""
    found = [(kind, parts.get(f"{kind}/{tensor}")) for kind in ("gaps", "mask")]
    present = [(kind, entry) for kind, entry in found if entry is not None]
    if len(present) != 1 or present[0][1].dtype != "U8":
        raise _unsound(delta, f"{tensor!r} needs gaps or a mask, and of bytes")
    kind, entry = present[0]
    data = source[entry.start : entry.end]
    if kind == "mask":
        bits = np.unpackbits(data, bitorder="little")
        if len(data) != -(-elements // 8) or bits[elements:].any():
            raise _unsound(delta, f"the mask of {tensor!r} is not of {elements} elements")
        return np.flatnonzero(bits)
    ends = np.cumsum(data + (data != GAP).astype(np.int64))
    if len(data) and (data[-1] == GAP or ends[-1] > elements):
        raise _unsound(delta, f"a position in {tensor!r} is beyond its {elements} elements")
    places: NDArray[np.int64] = ends[data != GAP] - 1
    return places


def _encode(changed: NDArray[np.bool_]) -> tuple[str, bytes]:
    """The smaller of the two ways to write where an array is true."""
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    skips = gaps // GAP
    if int(skips.sum()) + len(gaps) >= -(-len(changed) // 8):
        return "mask", np.packbits(changed, bitorder="little").tobytes()
    written = np.full(int(skips.sum()) + len(gaps), GAP, dtype=np.uint8)
    written[np.cumsum(skips + 1) - 1] = gaps % GAP
    return "gaps", written.tobytes()


def _elements(data: bytes | Bytes, entry: TensorEntry) -> NDArray[np.unsignedinteger]:
    """A tensor's elements as bits, flat; a view."""
    whole = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    return whole[entry.start : entry.end].view(BITS[DTYPE_BYTES[entry.dtype]])


def _kind(entry: TensorEntry) -> tuple[str, str, Sequence[int]]:
    return entry.name, entry.dtype, entry.shape


def _container(parts: Mapping[str, tuple[str, bytes]]) -> bytes:
    """A safetensors file of flat tensors: of each its dtype and bytes."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, data) in parts.items():
        start, end = end, end + len(data)
        shape = [len(data) // DTYPE_BYTES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for _, data in parts.values())])


def _unsound(delta: Path, reason: str) -> BlobError:
    return BlobError(f"delta {delta} is not sound: {reason}")
