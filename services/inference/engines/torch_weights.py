"""Weights of models: whether a file fits, before any of it is loaded; models that share them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headrace.errors import BlobError


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. BlobError where it is none."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BlobError(f"{path} is no readable safetensors file: {error}") from error


class Shaped(Protocol):
    """A tensor, or what tells of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""


def check_fit(own: Mapping[str, Tensor], given: Mapping[str, Shaped]) -> None:
    """BlobError where the tensors given are not, by name and shape, a model's own.

    Those may be on whatever device. Of names that share one tensor (tied embeddings), one is
    enough.
    """
    strange = sorted(set(given) - set(own))
    there = {id(own[name]) for name in given if name in own}
    missing = sorted(name for name, value in own.items() if id(value) not in there)
    shaped = [
        f"{name} {list(value.shape)}, not {list(own[name].shape)}"
        for name, value in given.items()
        if name in own and value.shape != own[name].shape
    ]
    for what, names in (("unknown", strange), ("missing", missing), ("shaped", shaped)):
        if names:
            raise BlobError(
                f"the weights don't fit the model: {what}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )


def sharing(model: Any) -> Any:
    """A model of its own modules and hooks, whose parameters and buffers are the other's."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
