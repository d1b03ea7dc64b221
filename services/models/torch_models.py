"""Reads models with torch and transformers, and checks that weights fit before any are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

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
        return AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"{model} has no usable config.json: {error}") from error


def architecture(model: Path) -> str:
    """Returns the name of the class of transformers that a model's configuration is for.

    Raises UsageError if transformers has no causal language model for it.
    """
    config = read_config(model)
    try:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return str(found.__name__)
    except KeyError:
        raise UsageError(f"{model}: {config.model_type} is not a causal language model") from None


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


def overwrite(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copies `given` into a model's own tensors. Raises BlobError as `check_fit` does."""
    check_fit(own, given)
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


class ChosenLogits:
    """Runs a causal language model and computes logits only at chosen positions.

    The output head is by far the widest layer, and most positions need no logits.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._chosen: tuple[Tensor, Tensor] | None = None
        model.get_output_embeddings().register_forward_pre_hook(self._choose)

    def __call__(self, rows: Tensor, columns: Tensor, **inputs: Any) -> Tensor:
        """Returns the logits [N, V] at the positions (rows [N], columns [N]) of the input ids."""
        self._chosen = rows, columns
        try:
            logits: Tensor = self._model(**inputs).logits
        finally:
            self._chosen = None
        return logits.squeeze(0)

    def _choose(self, module: Any, hidden: tuple[Tensor]) -> tuple[Tensor] | None:
        return None if self._chosen is None else (hidden[0][self._chosen].unsqueeze(0),)
