"""Reads weights, checks that they fit a model before any are loaded, and makes adapted models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from headrace.errors import BlobError, UsageError
from headrace.services.inference.engine import AdapterWeights
from headrace.services.models.lora import attach


def read_config(model: Path) -> Any:
    """Reads a model's configuration. Raises UsageError if its folder has no usable config.json."""
    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"{model} has no usable config.json: {error}") from error


def read_file(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file. Raises BlobError if the file is damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise BlobError(f"{path} is not a readable safetensors file: {error}") from error


class Shaped(Protocol):
    """A tensor, or the description of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""


def check_fit(own: Mapping[str, Tensor], given: Mapping[str, Shaped]) -> None:
    """Raises BlobError unless `given` has the names and shapes of a model's own tensors.

    `own` may be on any device. If several names share a tensor (tied embeddings), one of the names
    is enough.
    """
    unknown = sorted(set(given) - set(own))
    there = {id(own[name]) for name in given if name in own}
    missing = sorted(name for name, value in own.items() if id(value) not in there)
    shaped = [
        f"{name} {list(value.shape)}, not {list(own[name].shape)}"
        for name, value in given.items()
        if name in own and value.shape != own[name].shape
    ]
    for what, names in (("unknown", unknown), ("missing", missing), ("shaped", shaped)):
        if names:
            raise BlobError(
                f"the weights don't fit the model: {what}: {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            )


def adapted(base: Any, adapter: AdapterWeights, dtype: torch.dtype) -> Any:
    """Returns a model with an empty adapter in `dtype`. It shares the tensors of `base`.

    The model has its own modules and hooks. Raises BlobError if the adapter does not fit it.
    """
    shared = [*base.parameters(), *base.buffers()]
    model = copy.deepcopy(base, {id(tensor): tensor for tensor in shared})
    try:
        attach(model, adapter.targets, adapter.rank, adapter.alpha, dtype)
    except ValueError as error:
        raise BlobError(f"the adapter does not fit the model: {error}") from error
    return model
