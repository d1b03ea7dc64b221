"""Float32 weights that the optimizer changes, for a model that computes in a narrower dtype.

An update is often smaller than half the distance between two bfloat16 numbers. It would be lost in
bfloat16 weights, but not in float32 weights. The model itself has the dtype of the engines, because
every rounding that only one of the two makes changes its logprobs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.services.models.even_rounding import round_evenly


class MasterWeights:
    """The weights of a model that learn, in float32, and copies of them in the model.

    If the model computes in float32 on the same device, these are the model's own weights.
    """

    def __init__(
        self, model: Any, dtype: torch.dtype, copies_on: torch.device | None = None
    ) -> None:
        """Converts the parameters of a float32 model to `dtype`. Its buffers keep their dtype.

        After each backward pass the gradients of the parameters are those of the master weights,
        added up in float32, and the parameters themselves have none.

        With `copies_on`, the master weights stay where the model is, and the model moves to that
        device.
        """
        self._copies: dict[str, Tensor] = {}
        self.by_name: dict[str, Tensor] = {}
        """By the names of the model's parameters that learn, in their order."""
        self.in_model: list[Tensor] = []
        """The model's own parameters that learn, in the same order."""
        for name, parameter in model.named_parameters():
            changed = parameter.dtype != dtype or copies_on is not None
            master = parameter
            if changed:
                place = copies_on or parameter.device
                if parameter.requires_grad:
                    master = nn.Parameter(parameter.data)
                parameter.data = parameter.data.to(place, dtype)
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                self._copies[name] = parameter
            if parameter.requires_grad:
                self.by_name[name] = master
                self.in_model.append(parameter)
        if copies_on is not None:
            for buffer in model.buffers():
                buffer.data = buffer.data.to(copies_on)
        round_evenly(model)

    def update_copies(self, *_: Any) -> None:
        """Rounds the master weights into the model. Call it after each change of them."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                copy.copy_(self.by_name[name])

    def drop_gradients(self) -> None:
        """Drops all gradients, and what a backward pass that failed has left in the model."""
        for weights in (self.by_name, self._copies):
            for one in weights.values():
                one.grad = None


def _move_gradient(master: Tensor, copy: Tensor) -> None:
    assert copy.grad is not None, "torch calls this hook when it has added up the gradient"
    gradient = copy.grad.to(master.device)
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient
    copy.grad = None
