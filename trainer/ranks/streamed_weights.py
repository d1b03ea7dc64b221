"""Writes the weights of all ranks as one safetensors file, and never holds them in memory.

FSDP2 divides a tensor along its first dimension, so its bytes are those of rank 0, then those of
rank 1, and so on. The ranks send theirs in pieces, and rank 0 appends them to the file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.services.models.blobs import disk_errors
from headrace.services.models.weights import (
    DTYPE_BYTES,
    TensorKind,
    file_header,
    tensors_digest,
)
from headrace.trainer.contract.weight_files import KINDS
from headrace.trainer.ranks.ranks import Ranks, own_part

PIECE = 1 << 20
"""How many numbers of a tensor a rank converts, sends and holds at once."""


class StreamedWeights:
    """The tensors that ranks publish together. All ranks must call the same methods.

    Rank 0 gets the bytes, the others nothing. Raises DependencyError if another rank is gone.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, ranks: Ranks) -> None:
        """Floats are written in `dtype`. A tied tensor is written once, by its first name."""
        names: dict[int, str] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), name)
        self._tensors = {name: tensors[name].detach() for name in names.values()}
        self._dtype = dtype
        self._ranks = ranks

    def write(self, path: Path) -> None:
        """Rank 0 writes the file that `weights_file` returns, in pieces. No rank holds all of it.

        Raises DependencyError if the disk can't take it.
        """
        if self._ranks.rank:
            self._write(None)
            return
        with disk_errors(f"write weights to {path}"), path.open("wb") as file:
            self._write(file)

    def in_memory(self) -> bytes:
        """Returns the file in rank 0, and no bytes in the others."""
        file = io.BytesIO()
        self._write(None if self._ranks.rank else file)
        return file.getvalue()

    def digest(self) -> bytes:
        """Returns the `weights_digest` of the file, in all ranks."""
        kinds = sorted(self._kinds())
        found = tensors_digest((kind, self._pieces(kind[0])) for kind in kinds)
        return self._ranks.gather(found)[0]

    def _write(self, file: BinaryIO | None) -> None:
        # As the library of safetensors orders them: wide numbers first, so that all are aligned.
        kinds = sorted(self._kinds(), key=lambda kind: (-DTYPE_BYTES[kind[1]], kind[0]))
        if file is not None:
            file.write(file_header(kinds, {"format": "pt"}))
        for name, _, _ in kinds:
            for piece in self._pieces(name):
                if file is not None:
                    file.write(piece)

    def _kinds(self) -> Iterator[TensorKind]:
        for name, tensor in self._tensors.items():
            dtype = self._dtype_of(tensor)
            yield name, KINDS[str(dtype).removeprefix("torch.")], tuple(tensor.shape)

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _pieces(self, name: str) -> Iterator[bytes]:
        """Yields the bytes of a tensor in rank 0. The other ranks send theirs."""
        tensor = self._tensors[name]
        own, dtype = own_part(tensor).flatten(), self._dtype_of(tensor)
        for rank, count in enumerate(self._counts(tensor)):
            for first in range(0, count, PIECE):
                size = min(PIECE, count - first)
                if rank == self._ranks.rank:
                    part = own[first : first + size].to(dtype).cpu().contiguous().view(torch.uint8)
                elif self._ranks.rank == 0:
                    part = torch.empty(size * dtype.itemsize, dtype=torch.uint8)
                else:
                    continue
                with self._ranks.noticing():
                    if rank and self._ranks.rank:
                        dist.send(part, 0)
                    elif rank:
                        dist.recv(part, rank)
                if self._ranks.rank == 0:
                    yield part.numpy().tobytes()

    def _counts(self, tensor: Tensor) -> list[int]:
        """Returns how many numbers of a tensor each rank writes."""
        if not isinstance(tensor, DTensor):  # All ranks have the same.
            return [tensor.numel()]
        rows, width = tensor.shape[0], prod(tensor.shape[1:])
        most = -(-rows // self._ranks.size)
        ends = [min(rows, most * rank) for rank in range(self._ranks.size + 1)]
        counts = [(end - start) * width for start, end in pairwise(ends)]
        assert counts[self._ranks.rank] == own_part(tensor).numel(), "it is divided by rows"
        return counts
