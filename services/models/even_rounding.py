"""Layers that round alike whether tokens are read one at a time or together.

An engine reads new tokens one at a time, a trainer reads all together, and then kernels add up the
same numbers in another order. In float32 the results differ by about 1e-7 of their size, which
nobody notices. But if they are rounded to bfloat16, about one result in several thousand is rounded
differently, and each of these changes all layers and tokens after it. There are two causes:

- **Attention.** How its kernels divide the work depends on the number of queries. In bfloat16 they
  also round the probabilities. In float64 one of 10^12 results differs.
- **Few rows.** On a CPU torch multiplies a vector, and small matrices, in bfloat16 by other kernels
  than large matrices. With enough rows, the result of one does not depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

WIDE_ATTENTION = "headrace_wide"
"""The name of `wide_attention` for transformers: a model's `attn_implementation`."""
PART = 1 << 17
"""How many numbers of the keys are made float64 at once. That is 1 MB."""
SMALL = 4096
"""Up to so many multiplications torch does not ask oneDNN for a product in bfloat16 (in ATen,
`use_mkldnn_bf16_matmul`)."""


def wide_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Returns torch's scaled dot-product attention, computed in a wider dtype, in that of `query`.

    That is float64 for a narrow dtype on a CPU, and otherwise float32: many GPUs hardly have
    float64. Shapes and options are those of transformers' `sdpa`: query [B, H, Q, D], key and value
    [B, G, K, D], result [B, Q, H, D].
    """
    wide = torch.float64 if _narrow_on_cpu(query) else torch.float32
    widened: dict[str, Any] = {
        name: one.to(wide) if isinstance(one, Tensor) and one.is_floating_point() else one
        for name, one in {"attention_mask": mask, **options}.items()
    }
    mask = widened.pop("attention_mask")
    # In parts, what was widened is still in the processor's cache when it is read.
    size = len(query) if wide == torch.float32 else max(1, PART * len(key) // max(1, key.numel()))
    found = []
    for first in range(0, max(1, len(query)), max(1, size)):  # an empty batch is one part
        part = slice(first, first + size)
        masked = mask if mask is None or len(mask) == 1 else mask[part]
        some = (query[part].to(wide), key[part].to(wide), value[part].to(wide), masked)
        one, _ = sdpa_attention_forward(module, *some, **widened)
        found.append(one.to(query.dtype))
    return found[0] if len(found) == 1 else torch.cat(found), None


AttentionInterface.register(WIDE_ATTENTION, wide_attention)
AttentionMaskInterface.register(WIDE_ATTENTION, sdpa_mask)


def round_evenly(model: Any, dtype: torch.dtype | None = None) -> None:
    """Makes the linear layers of a narrow model on a CPU compute few rows like many.

    Call it when the model has its adapters. `dtype` is the one in which the layers compute. If it
    is absent, that is the dtype of their weights. Layers that were changed before stay as they are.
    Experts that hold the weights of several layers in one tensor are no linear layers.
    """
    layers: list[Any] = [one for one in model.modules() if isinstance(one, nn.Linear | Conv1D)]
    for layer in layers:
        changed = isinstance(layer.forward, partial) and layer.forward.func is _padded
        if not changed and _narrow_on_cpu(layer.weight, dtype):
            least = max(2, SMALL // layer.weight.numel() + 1)
            layer.forward = partial(_padded, layer.forward, least)


def _padded(
    forward: Callable[..., Tensor], least: int, /, *unnamed: Tensor, **named: Tensor
) -> Tensor:
    """Calls a linear layer, with rows of zeros if it has fewer than `least` rows.

    Its only argument keeps its name: layers of torch and of transformers have different ones.
    """
    (inputs,) = (*unnamed, *named.values())
    *shape, width = inputs.shape
    count = math.prod(shape)
    if count == 0 or count >= least:
        return forward(*unnamed, **named)
    rows = nn.functional.pad(inputs.reshape(count, width), (0, 0, 0, least - count))
    result = forward(rows) if unnamed else forward(**dict.fromkeys(named, rows))
    return result[:count].view(*shape, -1)


def _narrow_on_cpu(tensor: Tensor, dtype: torch.dtype | None = None) -> bool:
    return (dtype or tensor.dtype) != torch.float32 and tensor.device.type == "cpu"
