"""Norms that round as those of transformers do, for vLLM's CPU build.

vLLM's own kernel adds the residual and takes the norm of the sum in float32. Transformers rounds
the sum to the model's dtype first. In bfloat16 that is the largest difference between the logprobs
of vLLM and those of the trainer. Import this module after the environment variables that vLLM reads
are set, as `vllm_engine` does: it replaces the norms of all models that vLLM loads in this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm

NATIVE_OPS = {"custom_ops": ["none"]}
"""vLLM's compilation settings with which rotations and activations are torch's own, too."""


@RMSNorm.register_oot
class RoundedNorm(RMSNorm):  # type: ignore[misc]
    """x * weight / sqrt(mean(x²) + eps), arXiv 1910.07467, with transformers' roundings."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Returns the norm of x [N, H], or of x + residual and that sum."""
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        total = x if residual is None else x + residual
        wide = total.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed = self.weight * (wide * scale).to(total.dtype)
        return normed if residual is None else (normed, total)
