"""Reads safetensors files without torch, and finds model folders.

A safetensors file (https://github.com/huggingface/safetensors#format) has the header's length (8
bytes, little-endian), a JSON header that maps each name to {dtype, shape, data_offsets}, and the
tensors' bytes without gaps. Other processes write these files, so all bounds are checked here.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import BlobError, UsageError
from headrace.services.models.hub import HUB_ID, hub_folder
from headrace.services.models.run_models import RunModel

ADAPTER = "adapter_model.safetensors"
"""The file of an adapter in a model folder. PEFT uses this name."""
ADAPTER_CONFIG = "adapter_config.json"
"""PEFT's description of that adapter."""
MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_DIMENSIONS = 16
CHUNK_BYTES = 1 << 20
HASHING_THREADS = 4
NAMED_TENSORS = 3
"""How many tensors an error names."""
MAX_INT = 2**63 - 1
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of one element."""
TensorKind = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype and shape."""
WeightsFile = bytes | Path
"""A safetensors file, in memory or on disk."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file. `start` and `end` are byte offsets in that file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _read_header(file: BinaryIO, name: str) -> dict[str, TensorEntry]:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise _damaged(name, f"its header says {length} bytes, but the file has {size} bytes")
    entries = _parse(name, file.read(length), first=8 + length)
    _check_cover(name, entries, first=8 + length, size=size)
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def read_entries(source: Path | bytes) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file by name, sorted by name.

    Raises BlobError if the file can't be read or is damaged.
    """
    with _opened(source) as (file, name):
        return _read_header(file, name)


def weights_digest(*sources: Path | bytes) -> bytes:
    """SHA-256 over the names, dtypes, shapes and bytes of all tensors, sorted by name.

    The digest does not depend on the layout of a file, and not on how many files hold the tensors.
    Raises BlobError if a file can't be read or is damaged, or if two files hold the same tensor.
    """
    with ExitStack() as opened:
        found: dict[str, tuple[TensorEntry, BinaryIO, str]] = {}
        for source in sources:
            file, name = opened.enter_context(_opened(source))
            for entry in _read_header(file, name).values():
                if entry.name in found:
                    raise _damaged(name, f"another file has tensor {entry.name!r} too")
                found[entry.name] = entry, file, name
        return tensors_digest(
            ((entry.name, entry.dtype, entry.shape), _chunks(file, entry, name))
            for _, (entry, file, name) in sorted(found.items())
        )


def tensors_digest(tensors: Iterable[tuple[TensorKind, Iterable[bytes]]]) -> bytes:
    """Returns the `weights_digest` of tensors, each with its bytes in pieces, sorted by name."""
    sha256 = hashlib.sha256()
    for kind, chunks in tensors:
        head = json.dumps(kind).encode()
        sha256.update(len(head).to_bytes(8, "little") + head)
        for chunk in chunks:
            sha256.update(chunk)
    return sha256.digest()


def tensor_digests(*sources: WeightsFile) -> dict[str, str]:
    """Returns the digest of each tensor in hex, by name, sorted by name.

    It is the `weights_digest` of a file that has this tensor alone. Raises BlobError if a file
    can't be read or is damaged.
    """

    def digest(found: tuple[WeightsFile, TensorEntry]) -> str:
        source, entry = found
        with _opened(source) as (file, name):
            kind = (entry.name, entry.dtype, entry.shape)
            return tensors_digest([(kind, _chunks(file, entry, name))]).hex()

    tensors = [(source, entry) for source in sources for entry in read_entries(source).values()]
    tensors.sort(key=lambda found: found[1].name)
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = pool.map(digest, tensors)
        return {entry.name: found for (_, entry), found in zip(tensors, digests, strict=True)}


def read_digests(file: Path) -> dict[str, str]:
    """Returns the table of `tensor_digests` that a file has as JSON.

    Raises BlobError if it has something else.
    """
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BlobError(f"can't read the digests of tensors in {file}: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(one, str) for one in table.values()):
        raise BlobError(f"{file} has no digests of tensors: it must map names to digests")
    return table


def name_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Returns a sentence that names the tensors whose digests differ, or that only one side has."""
    names = sorted(expected.keys() | found.keys())
    wrong = [name for name in names if expected.get(name) != found.get(name)]
    if not wrong:
        return "All of its tensors are as they were published, so the published digest is wrong"
    named = ", ".join(wrong[:NAMED_TENSORS]) + (", …" if len(wrong) > NAMED_TENSORS else "")
    return f"{len(wrong)} of its {len(names)} tensors differ: {named}"


def file_header(kinds: Iterable[TensorKind], metadata: Mapping[str, str] | None = None) -> bytes:
    """Returns what precedes the tensors' bytes in a safetensors file, in this order."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape in kinds:
        start, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_chunks(source: Path, entry: TensorEntry) -> Iterator[bytes]:
    """Yields the bytes of a tensor in pieces of at most 1 MiB. Raises BlobError if some miss."""
    with _opened(source) as (file, name):
        yield from _chunks(file, entry, name)


def _chunks(file: BinaryIO, entry: TensorEntry, name: str) -> Iterator[bytes]:
    file.seek(entry.start)
    left = entry.end - entry.start
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise _damaged(name, f"it ends inside tensor {entry.name!r}")
        yield chunk
        left -= len(chunk)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[BinaryIO, str]]:
    """Opens a file, or bytes as a file, with the name that messages call it by."""
    if isinstance(source, bytes):
        yield io.BytesIO(source), "in memory"
        return
    try:
        with source.open("rb") as file:
            yield file, str(source)
    except OSError as error:
        raise BlobError(f"can't read weights {source}: {error}") from error


def model_folder(model: str, *, weights: bool = False) -> Path:
    """Returns the folder of a recipe's `model`.

    `model` is a path, the name of a model in `infra/models`, `owner/name@revision` of the Hugging
    Face Hub, or a resolved reference to a version of a run. Weights are fetched from the Hub only
    if `weights` is set. Raises UsageError if the folder lacks `config.json` or `tokenizer.json`,
    and what `hub_folder` raises.
    """
    if (reference := RunModel.parse(model)) is not None:
        folder = reference.folder(weights=weights)
        if not folder.is_dir():
            raise UsageError(
                f"model {model} is not in the cache {folder.parent}. Start this command again with "
                "the --blobs of the run, so that it is fetched"
            )
        return folder
    shipped = Path(str(files("headrace.infra"))) / "models"
    named = Path(model).name == model
    folder = shipped / model if named else Path(model).expanduser()
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).is_file()]
    if missing and hub_model(model) is not None:
        return hub_folder(model, weights=weights)
    if missing:
        names = sorted(config.parent.name for config in shipped.glob("*/config.json"))
        raise UsageError(
            f"model {model!r}: {folder} has no {' and no '.join(missing)}. Give the path of a "
            f"model folder, owner/name of the Hugging Face Hub, or one of: {', '.join(names)}"
        )
    return folder


def hub_model(model: str) -> tuple[str, str | None] | None:
    """Returns the repository and the revision of a recipe's `model` if it is one of the Hub."""
    named = HUB_ID.fullmatch(model)
    if named is None or Path(model).expanduser().exists():
        return None
    return named["repository"], named["revision"]


def adapter_config(rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """Returns what PEFT's description of an adapter must contain."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
    }


def _parse(file: str, header: bytes, first: int) -> list[TensorEntry]:
    try:
        tree = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"its header is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise _damaged(file, "its header is not a JSON object")
    tree.pop("__metadata__", None)
    return [_entry(file, name, fields, first) for name, fields in tree.items()]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("a name occurs twice")
    return tree


def _entry(file: str, name: str, fields: Any, first: int) -> TensorEntry:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(
            file, f"tensor {name!r} must have dtype, shape and data_offsets, and nothing else"
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _damaged(file, f"tensor {name!r} has an unknown dtype")
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise _damaged(file, f"tensor {name!r} has no usable shape")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"tensor {name!r} has no usable data_offsets")
    if offsets[1] - offsets[0] != prod(shape) * DTYPE_BYTES[dtype]:
        raise _damaged(
            file, f"tensor {name!r} has more or fewer bytes than its shape and dtype need"
        )
    return TensorEntry(name, dtype, tuple(shape), first + offsets[0], first + offsets[1])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number <= MAX_INT for number in value
    )


def _check_cover(file: str, entries: list[TensorEntry], first: int, size: int) -> None:
    """Raises BlobError unless the tensors fill the file to its end without gap or overlap."""
    expected = first
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.end)):
        if entry.start != expected:
            raise _damaged(
                file, f"tensor {entry.name!r} overlaps another tensor, or a gap precedes it"
            )
        expected = entry.end
    if expected != size:
        raise _damaged(file, f"its tensors end at byte {expected}, but the file ends at {size}")


def _damaged(file: str, reason: str) -> BlobError:
    return BlobError(f"weights {file} are not a valid safetensors file: {reason}")
