"""LoRA adapters on transformers models: one definition, for the trainer and for the torch engine.

A layer x -> W x becomes x -> W x + (alpha / rank) B A x; W is frozen, A [rank, in] and B [out,
rank] learn (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685,
section 4.1). The pair is two modules inside the layer, `lora_A` and `lora_B`, so that the base
keeps its names, and the adapter's are PEFT's but for a prefix (docs/decisions/0016).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PREFIX = "base_model.model."
"""What PEFT puts before a model's own names in an adapter's file."""


def attach(
    model: Any, targets: Sequence[str], rank: int, alpha: float, dtype: torch.dtype
) -> tuple[str, ...]:
    """Gives a model's layers an adapter that adds nothing yet: A and B are zero, in `dtype`.

    `targets` are as `Lora.targets` of a recipe; returns the layers' full names. ValueError where
    one names no linear layer.
    """
    chosen = _chosen(model, targets)
    for layer in chosen.values():
        inside, outside = _width(layer)
        kind = {"bias": False, "dtype": dtype, "device": layer.weight.device}
        # Made unfilled: filling them would move the process's random numbers on.
        unfilled: Any = nn.utils.skip_init
        layer.lora_A = unfilled(nn.Linear, inside, rank, **kind)
        layer.lora_B = unfilled(nn.Linear, rank, outside, **kind)
        for linear in (layer.lora_A, layer.lora_B):
            nn.init.zeros_(linear.weight)
        layer.register_forward_hook(_Adds(alpha / rank))
    return tuple(chosen)


def start(model: Any, seed: int) -> None:
    """Fills an attached adapter as the paper's authors do: A at random by `seed`, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in adapter_tensors(model).items():
        with torch.no_grad():
            if ".lora_A." in name:
                drawn = torch.empty(tensor.shape)
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
                tensor.copy_(drawn)
            else:
                tensor.zero_()


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The attached adapter's own tensors, by the names that PEFT gives them."""
    return {f"{PREFIX}{name}": tensor for name, tensor in _state(model) if _of_an_adapter(name)}


def base_tensors(model: Any) -> dict[str, Tensor]:
    """All other tensors of a model, by its own names; tied ones under each of theirs."""
    return {name: tensor for name, tensor in _state(model) if not _of_an_adapter(name)}


def _chosen(model: Any, targets: Sequence[str]) -> dict[str, Any]:
    """The layers that `targets` name, by their full names, in the model's order."""
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
            f"no linear layer of the model is called {lost[0]!r}; it has: {', '.join(last)}"
        )
    chosen = {name for names in found.values() for name in names}
    return {name: module for name, module in linear.items() if name in chosen}


class _Adds:
    """A forward hook: adds a layer's pair to what the layer itself says."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        added: Tensor = layer.lora_B(layer.lora_A(inputs[0]))
        return output + added * self._scale


def _width(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """Of what goes in, and of what comes out. GPT-2's layers keep their weights transposed."""
    rows, columns = layer.weight.shape
    return (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)


def _state(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict(keep_vars=True).items()


def _of_an_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
