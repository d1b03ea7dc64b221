"""Writes weights as the files of a model folder, as transformers and vLLM read them.

Weights up to a size are one file, `model.safetensors`. Larger ones are several files and an index.
Tensors are copied in small pieces, so that a model of any size takes little memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from headrace.services.models.blobs import disk_errors
from headrace.services.models.weights import TensorEntry, read_chunks, read_entries

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file, unless a single tensor is larger."""
WEIGHTS = "model.safetensors"


def write_shards(
    source: Path,
    folder: Path,
    *,
    changed: Mapping[str, Callable[[], bytes]] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Path]:
    """Writes the tensors of a safetensors file into `folder`, and returns the new files.

    `changed` gives, by name, functions that return the bytes of tensors that differ from the
    source; shapes and dtypes stay. `on_bytes` is called with the number of bytes of each piece.
    Raises BlobError if the source is damaged, and DependencyError if the disk can't take the files.
    """
    # In the order of the source: there, tensors of wider dtypes come first, which aligns all.
    entries = sorted(read_entries(source).values(), key=lambda entry: entry.start)
    shards = _split(entries, shard_bytes)
    several = len(shards) > 1
    paths = []
    for number, shard in enumerate(shards, 1):
        stem = f"model-{number:05}-of-{len(shards):05}.safetensors" if several else WEIGHTS
        paths.append(folder / stem)
        with disk_errors(f"write weights to {paths[-1]}"):
            _write(source, shard, paths[-1], changed or {}, on_bytes)
    if several:
        named = [(entry.name, path.name) for path, one in zip(paths, shards, strict=True) for entry in one]
        size = sum(entry.end - entry.start for entry in entries)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(named))}
        with disk_errors(f"write {folder / WEIGHTS}.index.json"):
            (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2))
    return paths


def _split(entries: Iterable[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    """Groups tensors in order, so that each group has at most `shard_bytes`, or one tensor."""
    shards: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        size = entry.end - entry.start
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _write(
    source: Path,
    shard: Sequence[TensorEntry],
    path: Path,
    changed: Mapping[str, Callable[[], bytes]],
    on_bytes: Callable[[int], None],
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in shard:
        start, end = end, end + entry.end - entry.start
        header[entry.name] = {
            "dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in shard:
            change = changed.get(entry.name)
            for chunk in [change()] if change else read_chunks(source, entry):
                file.write(chunk)
                on_bytes(len(chunk))
        file.flush()
        os.fsync(file.fileno())
