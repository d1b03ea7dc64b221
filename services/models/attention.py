"""Attention that rounds alike whether tokens are read one at a time or together.

Kernels for bfloat16 round the probabilities of attention to bfloat16, and in which sequence depends
on how many tokens they read at once. An engine reads new tokens one at a time, a trainer reads all
together. In float32 the difference is so small that the rounded result is nearly always the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

FLOAT32_ATTENTION = "headrace_float32"
"""The name of this attention for transformers: a model's `attn_implementation`."""


def float32_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Returns torch's scaled dot-product attention, computed in float32, in the dtype of `query`.

    Shapes and options are those of transformers' `sdpa`: query [B, H, Q, D], key and value
    [B, G, K, D], result [B, Q, H, D].
    """
    floats: dict[str, Any] = {
        name: one.float() if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in {"attention_mask": mask, **options}.items()
    }
    found, _ = sdpa_attention_forward(module, query.float(), key.float(), value.float(), **floats)
    return found.to(query.dtype), None


AttentionInterface.register(FLOAT32_ATTENTION, float32_attention)
AttentionMaskInterface.register(FLOAT32_ATTENTION, sdpa_mask)
