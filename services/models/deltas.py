"""Weight deltas: turn the weights of one version into those of another, bit by bit.

A delta is a safetensors file. For each tensor NAME that changed it holds the new values and, in
whichever form is smaller, their positions:

- `values/NAME`: the new values in the tensor's own dtype, shape [n], in the order of positions;
- `gaps/NAME` (U8): for each changed element one byte, the number of unchanged elements before it;
  the byte 255 stands for 255 unchanged elements and no changed one; or
- `mask/NAME` (U8): one bit for each element, 1 if it changed, the lowest bit of a byte first.

Positions ascend in both forms, so none can occur twice. Elements are compared and copied as bits:
NaNs keep their payload, and zeros keep their sign. All functions block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BlobError
from headrace.services.models.weights import DTYPE_BYTES, TensorEntry, read_entries

Bytes = NDArray[np.uint8]

GAP = 255
"""The byte that stands for 255 unchanged elements and no changed one."""
BITS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
"""The dtype to read an element of so many bytes."""


def diff(before: bytes, after: bytes, limit: int) -> bytes | None:
    """Returns the delta from `before` to `after`, two safetensors files.

    Returns None if their tensors differ in name, dtype or shape, or if the delta would have `limit`
    bytes or more.
    """
    old, new = (list(read_entries(data).values()) for data in (before, after))
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
        # Compare a lower bound of the size first: the positions take eight bytes each in memory.
        if size + count * b.itemsize + min(count, len(b) // 8) >= limit:
            return None
        kind, positions = _encode(changed)
        parts[f"{kind}/{entry.name}"] = ("U8", positions)
        parts[f"values/{entry.name}"] = (entry.dtype, b[changed].tobytes())
        size += len(positions) + count * b.itemsize
    delta = _container(parts)
    return delta if len(delta) < limit else None


def apply(weights: Path, delta: Path) -> None:
    """Overwrites the elements of the safetensors file `weights` that a delta changes.

    Raises BlobError if the delta is damaged or does not fit these weights. The file `weights` is
    unusable after such an error.
    """
    targets, parts = read_entries(weights), read_entries(delta)
    try:
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
                raise _damaged(delta, f"{name!r} has no values")
            continue
        entry = targets.get(tensor)
        if kind != "values" or entry is None:
            raise _damaged(delta, f"the weights have no tensor for {name!r}")
        if values.dtype != entry.dtype:
            raise _damaged(delta, f"{name!r} is {values.dtype}, but the tensor is {entry.dtype}")
        at = _positions(delta, tensor, parts, source, prod(entry.shape))
        if values.shape != (len(at),):
            raise _damaged(delta, f"{name!r} has shape {values.shape} for {len(at)} positions")
        _elements(target, entry)[at] = _elements(source, values)
    target.flush()


def _positions(
    delta: Path, tensor: str, parts: Mapping[str, TensorEntry], source: Bytes, elements: int
) -> NDArray[np.int64]:
    """The positions of a tensor's changed elements: ascending, checked to be inside the tensor."""
    found = [(kind, parts.get(f"{kind}/{tensor}")) for kind in ("gaps", "mask")]
    present = [(kind, entry) for kind, entry in found if entry is not None]
    if len(present) != 1 or present[0][1].dtype != "U8":
        raise _damaged(delta, f"{tensor!r} needs either gaps or a mask, in dtype U8")
    kind, entry = present[0]
    data = source[entry.start : entry.end]
    if kind == "mask":
        bits = np.unpackbits(data, bitorder="little")
        if len(data) != -(-elements // 8) or bits[elements:].any():
            raise _damaged(delta, f"the mask of {tensor!r} does not have {elements} bits")
        return np.flatnonzero(bits)
    ends = np.cumsum(data + (data != GAP).astype(np.int64))
    if len(data) and (data[-1] == GAP or ends[-1] > elements):
        raise _damaged(delta, f"a position in {tensor!r} is beyond its {elements} elements")
    positions: NDArray[np.int64] = ends[data != GAP] - 1
    return positions


def _encode(changed: NDArray[np.bool_]) -> tuple[str, bytes]:
    """Writes the positions of true elements in the smaller form: its kind, and its bytes."""
    gaps = np.diff(np.flatnonzero(changed), prepend=-1) - 1
    skips = gaps // GAP
    if int(skips.sum()) + len(gaps) >= -(-len(changed) // 8):
        return "mask", np.packbits(changed, bitorder="little").tobytes()
    written = np.full(int(skips.sum()) + len(gaps), GAP, dtype=np.uint8)
    written[np.cumsum(skips + 1) - 1] = gaps % GAP
    return "gaps", written.tobytes()


def _elements(data: bytes | Bytes, entry: TensorEntry) -> NDArray[np.unsignedinteger]:
    """A flat view of a tensor's elements as unsigned integers of the same width."""
    whole = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    return whole[entry.start : entry.end].view(BITS[DTYPE_BYTES[entry.dtype]])


def _kind(entry: TensorEntry) -> tuple[str, str, Sequence[int]]:
    return entry.name, entry.dtype, entry.shape


def _container(parts: Mapping[str, tuple[str, bytes]]) -> bytes:
    """A safetensors file of flat tensors. `parts` maps each name to dtype and bytes."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, data) in parts.items():
        start, end = end, end + len(data)
        shape = [len(data) // DTYPE_BYTES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(data for _, data in parts.values())])


def _damaged(delta: Path, reason: str) -> BlobError:
    return BlobError(f"delta {delta} is damaged or does not fit the weights: {reason}")
