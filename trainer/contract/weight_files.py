"""Weights of other trainers as one safetensors file, without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.errors import UsageError
from headrace.services.models.weights import TensorEntry, read_chunks, read_entries

GivenWeights = bytes | str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]]
"""A safetensors file as bytes; the path of such a file, or of a folder of them; or names with numpy
arrays or torch tensors."""
KINDS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
"""The name of a dtype to its name in a safetensors file."""
FLOATS = ("F16", "BF16", "F32", "F64")


def pack_weights(weights: GivenWeights) -> bytes:
    """Returns weights as one safetensors file.

    An iterable is read once, in the thread of the caller. Raises UsageError if it gives no tensor,
    if a name comes twice, or if a tensor has a dtype that weights can't have, and BlobError if a
    file is damaged.
    """
    if isinstance(weights, bytes):
        read_entries(weights)
        return weights
    if isinstance(weights, str | Path):
        return _read_path(Path(weights))
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, array in pairs:
        if name in tensors:
            raise UsageError(f"the weights have the tensor {name!r} twice: give each name once")
        tensors[name] = _raw(name, array)
    return _write(tensors)


def check_layout(packed: bytes, dtype: str, before: bytes | Path | None) -> None:
    """Raises UsageError unless inference workers can load these weights after those before them.

    `dtype` is the policy's number format in the recipe. `before` are the weights of an earlier
    version, whose tensors have the same names, dtypes and shapes. None: nothing is compared.
    """
    entries = read_entries(packed)
    wrong = [e for e in entries.values() if e.dtype in FLOATS and e.dtype != KINDS[dtype]]
    if wrong:
        raise UsageError(
            f"tensor {wrong[0].name!r} is {wrong[0].dtype}, but the recipe's policy has the dtype "
            f"{dtype}: convert the weights, or change the recipe for a new run"
        )
    if before is None:
        return
    old, new = ({_kind(one) for one in read_entries(data).values()} for data in (before, packed))
    if old != new:
        raise UsageError(
            "the weights have other tensors than the version before them. Only one of them has: "
            f"{sorted(old ^ new)[:3]}. Give every version the same names, dtypes and shapes"
        )


def _kind(entry: TensorEntry) -> tuple[str, str, tuple[int, ...]]:
    return entry.name, entry.dtype, tuple(entry.shape)


def _read_path(path: Path) -> bytes:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for file in files:
        for entry in read_entries(file).values():
            if entry.name in tensors:
                raise UsageError(f"two files of {path} have the tensor {entry.name!r}")
            tensors[entry.name] = entry.dtype, entry.shape, b"".join(read_chunks(file, entry))
    if not tensors:
        raise UsageError(f"{path} has no weights: name a safetensors file, or a folder of some")
    return _write(tensors)


def _raw(name: str, array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Returns the kind, the shape and the bytes of a numpy array or a torch tensor."""
    torch = sys.modules.get("torch")
    kind = KINDS.get(str(array.dtype).removeprefix("torch."))
    if kind is None:
        raise UsageError(f"tensor {name!r} has the dtype {array.dtype}: use one of {list(KINDS)}")
    shape = tuple(map(int, array.shape))
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return kind, shape, np.ascontiguousarray(array).tobytes()


def _write(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """Returns a safetensors file. Wide elements come first, so that all are aligned."""
    if not tensors:
        raise UsageError("there are no weights to publish: give at least one tensor")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body: list[bytes] = []
    end = 0

    def width(item: tuple[str, tuple[str, tuple[int, ...], bytes]]) -> tuple[int, str]:
        name, (_, shape, data) = item
        return -(len(data) // max(1, prod(shape))), name

    for name, (kind, shape, data) in sorted(tensors.items(), key=width):
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
        body.append(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, *body])
