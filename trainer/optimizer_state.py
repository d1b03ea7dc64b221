"""An optimizer's state as tensors by name, as checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def above(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with `kind` and a dot before their names."""
    return {f"{kind}.{name}": one for name, one in tensors.items()}


def under(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names begin with `kind` and a dot, by the rest of their names."""
    start = f"{kind}."
    return {name[len(start) :]: one for name, one in tensors.items() if name.startswith(start)}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns the moments of each parameter as `INDEX.NAME`. They share the optimizer's memory."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": one for index, moments in state.items() for name, one in moments.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Restores what `optimizer_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, field = name.partition(".")
        # The optimizer changes its tensors, so it gets copies.
        state.setdefault(int(index), {})[field] = tensor.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
