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

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BlobError
from headrace.services.models.weights import (
    DTYPE_BYTES,
    TensorEntry,
    TensorKind,
    WeightsFile,
    file_header,
    read_entries,
)

Bytes = NDArray[np.uint8]

GAP = 255
"""The byte that stands for 255 unchanged elements and no changed one."""
PIECE = 1 << 20
"""How many elements are compared at once: a multiple of 8, so that masks have whole bytes."""
BITS = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
"""The dtype to read an element of so many bytes."""


def diff(before: WeightsFile, after: WeightsFile, limit: int) -> bytes | None:
    """Returns in memory what `write_diff` writes, or None if it writes nothing."""
    file = io.BytesIO()
    return file.getvalue() if write_diff(before, after, limit, file) else None


def write_diff(before: WeightsFile, after: WeightsFile, limit: int, file: BinaryIO) -> bool:
    """Writes the delta from `before` to `after`, two safetensors files.

    Takes the memory of a few pieces of a tensor, unless the files are in memory. Writes nothing and
    returns False if their tensors differ in name, dtype or shape, or if the delta would have
    `limit` bytes or more. Raises BlobError if a file can't be read.
    """
    old, new = (list(read_entries(data).values()) for data in (before, after))
    if [_kind(entry) for entry in old] != [_kind(entry) for entry in new]:
        return False
    first, second = _bytes_of(before), _bytes_of(after)
    changes: list[_Change] = []
    size = 0
    for was, entry in zip(old, new, strict=True):
        change = _Change.between(entry, _elements(first, was), _elements(second, entry))
        if change.count:
            changes.append(change)
            size += change.size
            if size >= limit:
                return False
    header = file_header(kind for change in changes for kind in change.kinds())
    if len(header) + size >= limit:
        return False
    file.write(header)
    for change in changes:
        for piece in (*change.positions(), *change.values()):
            file.write(piece)
    return True


@dataclass(frozen=True, slots=True)
class _Change:
    """A tensor before and after, how many of its elements changed, and the bytes of their gaps."""

    entry: TensorEntry
    before: NDArray[np.unsignedinteger]
    after: NDArray[np.unsignedinteger]
    count: int = 0
    gap_bytes: int = 0

    @classmethod
    def between(
        cls,
        entry: TensorEntry,
        before: NDArray[np.unsignedinteger],
        after: NDArray[np.unsignedinteger],
    ) -> _Change:
        change = cls(entry, before, after)
        count = gap_bytes = 0
        for gaps in change._gaps():
            count += len(gaps)
            gap_bytes += len(gaps) + int((gaps // GAP).sum())
        return replace(change, count=count, gap_bytes=gap_bytes)

    @property
    def _mask_bytes(self) -> int:
        return -(-len(self.after) // 8)

    @property
    def size(self) -> int:
        return min(self.gap_bytes, self._mask_bytes) + self.count * self.after.itemsize

    def kinds(self) -> list[TensorKind]:
        name, masked = self.entry.name, self.gap_bytes >= self._mask_bytes
        kind, size = ("mask", self._mask_bytes) if masked else ("gaps", self.gap_bytes)
        return [
            (f"{kind}/{name}", "U8", (size,)),
            (f"values/{name}", self.entry.dtype, (self.count,)),
        ]

    def positions(self) -> Iterator[bytes]:
        if self.gap_bytes >= self._mask_bytes:
            for _, changed in self._changed():
                yield np.packbits(changed, bitorder="little").tobytes()
            return
        for gaps in self._gaps():
            skips = gaps // GAP
            written = np.full(int(skips.sum()) + len(gaps), GAP, dtype=np.uint8)
            written[np.cumsum(skips + 1) - 1] = gaps % GAP
            yield written.tobytes()

    def values(self) -> Iterator[bytes]:
        for first, changed in self._changed():
            yield self.after[first : first + PIECE][changed].tobytes()

    def _changed(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        for first in range(0, len(self.after), PIECE):
            part = slice(first, first + PIECE)
            yield first, self.before[part] != self.after[part]

    def _gaps(self) -> Iterator[NDArray[np.int64]]:
        """Yields, by piece, how many unchanged elements precede each changed one."""
        last = -1
        for first, changed in self._changed():
            found = np.flatnonzero(changed) + first
            if len(found):
                yield np.diff(found, prepend=last) - 1
                last = int(found[-1])


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


def _bytes_of(data: WeightsFile) -> Bytes:
    if isinstance(data, bytes):
        return np.frombuffer(data, dtype=np.uint8)
    try:
        return np.memmap(data, dtype=np.uint8, mode="r")
    except OSError as error:
        raise BlobError(f"can't read weights {data}: {error}") from error


def _elements(data: Bytes, entry: TensorEntry) -> NDArray[np.unsignedinteger]:
    """A flat view of a tensor's elements as unsigned integers of the same width."""
    return data[entry.start : entry.end].view(BITS[DTYPE_BYTES[entry.dtype]])


def _kind(entry: TensorEntry) -> TensorKind:
    return entry.name, entry.dtype, entry.shape


def _damaged(delta: Path, reason: str) -> BlobError:
    return BlobError(f"delta {delta} is damaged or does not fit the weights: {reason}")
