"""LoRA adapters on transformers models. The trainer and the engines share this definition.

A layer x -> W x becomes x -> W x + (alpha / rank) B A x. W is frozen; A [rank, in] and B [out,
rank] are trained (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models",
arXiv:2106.09685, section 4.1). A and B are modules inside the layer, `lora_A` and `lora_B`. So the
base keeps its names, and the adapter's names are PEFT's without a prefix (docs/decisions/0016).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from headrace.errors import BlobError
from headrace.services.models.torch_models import read_config
from headrace.services.models.weights import read_entries

PREFIX = "base_model.model."
"""PEFT puts this before a model's own names in an adapter's file."""


def attach(
    model: Any, targets: Sequence[str], rank: int, alpha: float, dtype: torch.dtype
) -> tuple[str, ...]:
    """Adds an adapter with zero weights in `dtype` to a model. Returns the layers' full names.

    `targets` has the form of a recipe's `Lora.targets`. Raises ValueError if a target names no
    linear layer.
    """
    chosen = _chosen(model, targets)
    for layer in chosen.values():
        inside, outside = _width(layer)
        kind = {"bias": False, "dtype": dtype, "device": layer.weight.device}
        # Skip the initialization: it would advance the process's random numbers.
        unfilled: Any = nn.utils.skip_init
        layer.lora_A = unfilled(nn.Linear, inside, rank, **kind)
        layer.lora_B = unfilled(nn.Linear, rank, outside, **kind)
        for linear in (layer.lora_A, layer.lora_B):
            nn.init.zeros_(linear.weight)
        layer.register_forward_hook(partial(_add_pair, alpha / rank))
    return tuple(chosen)


def adapted(base: Any, targets: Sequence[str], rank: int, alpha: float, dtype: torch.dtype) -> Any:
    """Returns a model with an empty adapter. It shares the tensors of `base`.

    The model has its own modules and hooks. Raises BlobError if the adapter does not fit it.
    """
    shared = [*base.parameters(), *base.buffers()]
    model = copy.deepcopy(base, {id(tensor): tensor for tensor in shared})
    try:
        attach(model, targets, rank, alpha, dtype)
    except ValueError as error:
        raise BlobError(f"the adapter does not fit the model: {error}") from error
    return model


def start(model: Any, seed: int) -> None:
    """Initializes a newly attached adapter as the paper does: A at random from `seed`, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter_tensors(model).items():
        if ".lora_A." in name:
            drawn = torch.empty(tensor.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            tensor.data.copy_(drawn)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Returns the tensors of the attached adapter by their PEFT names."""
    state = model.state_dict(keep_vars=True)
    return {f"{PREFIX}{name}": tensor for name, tensor in state.items() if _of_an_adapter(name)}


def base_tensors(model: Any) -> dict[str, Tensor]:
    """Returns all other tensors by the model's own names. A tied tensor has several names."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if not _of_an_adapter(name)}


class Merger:
    """Computes a base's layers with an adapter added, one layer at a time. It needs no model."""

    def __init__(self, model: Path, base: Path, adapter: Path, scale: float) -> None:
        """`model` is the folder of the configuration; `base` and `adapter` are safetensors files.

        `scale` is alpha / rank. Raises BlobError if the base lacks a layer of the adapter.
        """
        self._base, self._adapter, self._scale = base, adapter, scale
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            modules = dict(make(read_config(model)).named_modules())
        pairs = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in read_entries(adapter)}
        self._transposed = {
            f"{layer}.weight": isinstance(modules.get(layer), Conv1D) for layer in sorted(pairs)
        }
        if lost := sorted(self._transposed.keys() - read_entries(base).keys()):
            raise BlobError(
                f"the adapter can't be merged: the base has no tensor {lost[0]!r} of its own. "
                "Export the adapter without merging it"
            )

    def changed(self) -> dict[str, Callable[[], bytes]]:
        """Returns, by the names of the base's tensors, functions that return the merged bytes."""
        return {name: partial(self._merged, name) for name in self._transposed}

    def _merged(self, name: str) -> bytes:
        layer = name.removesuffix(".weight")
        with safe_open(self._base, "pt") as base, safe_open(self._adapter, "pt") as adapter:
            weight = base.get_tensor(name)
            a, b = (adapter.get_tensor(f"{PREFIX}{layer}.lora_{one}.weight") for one in "AB")
        change = (b.float() @ a.float()) * self._scale
        merged = weight.float() + (change.T if self._transposed[name] else change)
        flat = merged.to(weight.dtype).contiguous().view(-1).view(torch.uint8)
        return bytes(flat.numpy().data)


def _chosen(model: Any, targets: Sequence[str]) -> dict[str, Any]:
    """The layers that `targets` name: by full name, in the model's order."""
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    if not targets:
        return {name: module for name, module in linear.items() if module is not head}
    found = {
        target: [name for name in linear if name == target or name.endswith(f".{target}")]
        for target in targets
    }
    if lost := [target for target, names in found.items() if not names]:
        last = sorted({name.rpartition(".")[2] for name in linear})
        raise ValueError(
            f"no linear layer of the model is called {lost[0]!r}. It has: {', '.join(last)}"
        )
    chosen = {name for names in found.values() for name in names}
    return {name: module for name, module in linear.items() if name in chosen}


def _add_pair(scale: float, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """A forward hook that adds the output of a layer's adapter to the layer's own output."""
    added: Tensor = layer.lora_B(layer.lora_A(inputs[0]))
    return output + added * scale


def _width(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """The input and output width. Conv1D, the layer of GPT-2, stores transposed weights."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _of_an_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
