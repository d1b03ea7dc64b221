"""Activation checkpointing: layers that keep their inputs, and compute the rest again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.errors import UsageError


def checkpoint_layers(model: Any) -> None:
    """Makes each layer of a transformers model keep only its inputs for the backward pass.

    The backward pass runs one layer again at a time (Chen et al., "Training Deep Nets with
    Sublinear Memory Cost", arXiv 1604.06174). Both passes compute the same numbers, because a model
    in training here has no dropout. The layers are those for which transformers itself has
    checkpointing. Its own switch needs the model's training mode, which turns on dropout.

    Raises UsageError if the model has no such layers.
    """
    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no layers that transformers can checkpoint. Set "
            "training.activation_checkpointing to false, and lower training.max_tokens if the "
            "memory is too small"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **options)
