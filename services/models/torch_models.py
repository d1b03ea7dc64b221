"""Reads models with torch and transformers, and checks that weights fit before any are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from headrace.errors import BlobError, UsageError
from headrace.services.models.weights import TensorEntry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the recipe's name."""


def pick_device(name: str) -> torch.device:
    """Returns the device of that name; `auto` is a GPU if there is one, else the CPU.

    Raises UsageError if torch has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"torch has no device {name!r} on this machine. Set `device` to `cpu`, `cuda` or "
            f"`auto`: {error}"
        ) from error


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


def check_fit(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor] | Mapping[str, TensorEntry]
) -> None:
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
