"""Model weights as files: the safetensors container, read without torch, and model folders.

The container (https://github.com/huggingface/safetensors#format): 8 bytes of header length,
little-endian; a JSON header of name to {dtype, shape, data_offsets}; then the tensors' bytes,
without gaps. A file comes from the log's writers, so its bounds are checked before it is trusted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import BlobError, UsageError
from headrace.services.models.hub import HUB_ID, hub_folder

ADAPTER = "adapter_model.safetensors"
"""What a model's folder calls an adapter beside its base, as PEFT does."""
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_DIMENSIONS = 16
CHUNK_BYTES = 1 << 20
MAX_INT = 2**63 - 1
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: `start` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: BinaryIO, cluster: str) -> list[TensorEntry]:
    """The tensors of a safetensors file, by name. BlobError where it is not sound.

    `cluster` is what the message calls the file.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise _unsound(cluster, f"its header says {length} bytes, the file has {size}")
    entries = _parse(cluster, file.read(length), first=8 + length)
    _check_cover(cluster, entries, first=8 + length, size=size)
    return sorted(entries, key=lambda entry: entry.name)


def weights_digest(source: Path | bytes) -> bytes:
    """SHA-256 over a safetensors file's tensors: names, dtypes, shapes and bytes, sorted by name.

    How the file lays them out has no part in it. BlobError where it is not sound.
    """
    if isinstance(source, bytes):
        return _tensors_digest(io.BytesIO(source), "in memory")
    try:
        with source.open("rb") as file:
            return _tensors_digest(file, str(source))
    except OSError as error:
        raise BlobError(f"can't read weights {source}: {error}") from error


def _tensors_digest(file: BinaryIO, cluster: str) -> bytes:
    sha256 = hashlib.sha256()
    for entry in read_header(file, cluster):
        head = json.dumps([entry.name, entry.dtype, entry.shape]).encode()
        sha256.update(len(head).to_bytes(8, "little") + head)
        file.seek(entry.start)
        left = entry.end - entry.start
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise _unsound(cluster, f"it ends within tensor {entry.name!r}")
            sha256.update(chunk)
            left -= len(chunk)
    return sha256.digest()


def model_folder(model: str, *, weights: bool = False) -> Path:
    """The folder of a recipe's `model`: a path, the name of one shipped in `infra/models`, or one
    of the Hugging Face Hub, as `owner/name@revision`.

    `weights` says that its weights are wanted, where it has any: the hub's are fetched only then.
    UsageError where it lacks `config.json` or `tokenizer.json`; `hub_folder` raises more.
    """
    shipped = Path(str(files("headrace.infra"))) / "models"
    named = Path(model).name == model
    folder = shipped / model if named else Path(model).expanduser()
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    if missing and not folder.exists() and HUB_ID.fullmatch(model):
        return hub_folder(model, weights=weights)
    if missing:
        names = sorted(config.parent.name for config in shipped.glob("*/config.json"))
        raise UsageError(
            f"model {model!r}: {folder} has no {' and no '.join(missing)}; give the path of a "
            f"model folder, owner/name of the Hugging Face Hub, or one of: {', '.join(names)}"
        )
    return folder


def _parse(cluster: str, header: bytes, first: int) -> list[TensorEntry]:
    try:
        tree = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _unsound(cluster, f"its header is no JSON: {error}") from error
    if not isinstance(tree, dict):
        raise _unsound(cluster, "its header is no JSON object")
    tree.pop("__metadata__", None)
    return [_entry(cluster, name, fields, first) for name, fields in tree.items()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a name occurs twice")
    return tree


def _entry(cluster: str, name: str, fields: Any, first: int) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _unsound(cluster, f"tensor {name!r} needs dtype, shape and data_offsets, and no more")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _unsound(cluster, f"tensor {name!r} has an unknown dtype")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise _unsound(cluster, f"tensor {name!r} has no usable shape")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _unsound(cluster, f"tensor {name!r} has no usable data_offsets")
    if offsets[1] - offsets[0] != prod(shape) * DTYPE_BYTES[dtype]:
        raise _unsound(cluster, f"tensor {name!r} has other bytes than its shape and dtype take")
    return TensorEntry(name, dtype, tuple(shape), first + offsets[0], first + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number <= MAX_INT for number in value
    )


def _check_cover(cluster: str, entries: list[TensorEntry], first: int, size: int) -> None:
    """The tensors' bytes follow one another without gap or overlap, to the file's end."""
    expected = first
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != expected:
            raise _unsound(cluster, f"tensor {entry.name!r} overlaps another, or leaves a gap")
        expected = entry.end
    if expected != size:
        raise _unsound(cluster, f"its tensors end at byte {expected}, the file at {size}")


def _unsound(cluster: str, reason: str) -> BlobError:
    return BlobError(f"weights {cluster} are no sound safetensors file: {reason}")
