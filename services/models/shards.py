"""Writes weights as the files of a model folder, as transformers and vLLM read them.

Weights up to a size are one file, `model.safetensors`. Larger ones are several files and an index.
Tensors are copied in small pieces, so that a model of any size takes little memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.services.models.blobs import disk_errors
from headrace.services.models.weights import (
    DTYPE_BYTES,
    TensorEntry,
    file_header,
    read_chunks,
    read_entries,
)

SHARD_BYTES = 5_000_000_000
"""The most bytes of tensors in one file, unless a single tensor is larger."""
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor, and the file that has it."""

    path: Path
    entry: TensorEntry

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.entry.end - self.entry.start


def write_shards(
    sources: Sequence[Path],
    folder: Path,
    *,
    changed: Mapping[str, Callable[[], bytes]] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> list[Path]:
    """Writes the tensors of safetensors files into `folder`, and returns the new files.

    `changed` gives, by name, functions that return the bytes of tensors that differ from the
    sources; shapes and dtypes stay. `on_bytes` is called with the number of bytes of each piece.
    Raises BlobError if a source is damaged, and DependencyError if the disk can't take the files.
    """
    tensors = [Source(path, entry) for path in sources for entry in read_entries(path).values()]
    # If tensors of wider dtypes come first, all are aligned.
    tensors.sort(key=lambda one: (-DTYPE_BYTES[one.entry.dtype], one.entry.name))
    shards = _split(tensors, shard_bytes)
    several = len(shards) > 1
    paths = []
    for number, shard in enumerate(shards, 1):
        stem = f"model-{number:05}-of-{len(shards):05}.safetensors" if several else WEIGHTS
        paths.append(folder / stem)
        with disk_errors(f"write weights to {paths[-1]}"):
            _write(shard, paths[-1], changed or {}, on_bytes)
    if several:
        files = {
            one.entry.name: path.name
            for path, shard in zip(paths, shards, strict=True)
            for one in shard
        }
        size = sum(one.size for one in tensors)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        with disk_errors(f"write {folder / WEIGHTS}.index.json"):
            (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index, indent=2))
    return paths


def _split(tensors: Iterable[Source], shard_bytes: int) -> list[list[Source]]:
    """Groups tensors in order, so that each group has at most `shard_bytes`, or one tensor."""
    shards: list[list[Source]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size
    return shards


def _write(
    shard: Sequence[Source],
    path: Path,
    changed: Mapping[str, Callable[[], bytes]],
    on_bytes: Callable[[int], None],
) -> None:
    kinds = ((one.entry.name, one.entry.dtype, one.entry.shape) for one in shard)
    with path.open("xb") as file:
        file.write(file_header(kinds, {"format": "pt"}))
        for one in shard:
            change = changed.get(one.entry.name)
            for chunk in [change()] if change else read_chunks(one.path, one.entry):
                file.write(chunk)
                on_bytes(len(chunk))
        file.flush()
        os.fsync(file.fileno())
