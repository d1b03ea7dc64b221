"""Sums up the metrics of one version's training over its micro-batches and updates."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.trainer.losses import MicroBatch, importance


class Totals:
    """Sums over the micro-batches and updates of one version."""

    def __init__(self) -> None:
        self._loss = torch.zeros(())
        self._norm = torch.zeros(())
        self._updates = 0
        self._sampled = 0
        self._demonstrated = 0
        self._cross_entropy = torch.zeros(())
        self._sums: dict[str, Tensor] = {}
        self._importance_max = torch.zeros(())

    def add(self, batch: MicroBatch, loss: Tensor, logprobs: Tensor, entropies: Tensor) -> None:
        """Adds a micro-batch's sampled tokens.

        `loss` is their part of the loss, a scalar; new `logprobs` and `entropies` are [N] in nats.
        """
        settings = batch.settings
        ratio = (logprobs - batch.proximal).exp()
        lag = batch.proximal - batch.behaviour
        weights = importance(batch)
        clipped = (ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)
        sums = {
            # KL divergence of the policy that sampled from the proximal policy, by estimator k3
            # of Schulman, "Approximating KL Divergence" (2020).
            "kl": (lag.exp() - 1 - lag).sum(),
            "entropy": entropies.sum(),
            "clip_fraction": clipped.float().sum(),
            "importance_mean": weights.sum(),
        }
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value.cpu()
        self._importance_max = torch.maximum(self._importance_max, weights.max().cpu())
        self._loss = self._loss + loss.cpu()
        self._sampled += len(logprobs)

    def add_demonstrated(self, loss: Tensor, logprobs: Tensor) -> None:
        """Adds a micro-batch's demonstrated tokens: their part of the loss, and logprobs [N]."""
        self._loss = self._loss + loss.cpu()
        self._cross_entropy = self._cross_entropy - logprobs.sum().cpu()
        self._demonstrated += len(logprobs)

    def add_update(self, norm: Tensor) -> None:
        """Adds an update by the norm of its gradient before clipping, a scalar."""
        self._norm = torch.maximum(self._norm, norm.cpu())
        self._updates += 1

    def finite(self) -> bool:
        """Returns whether loss and gradients have been finite so far."""
        return bool(torch.isfinite(self._loss) and torch.isfinite(self._norm))

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name.

        `loss` is a mean over updates, `grad_norm` and `importance_max` are maxima, `tokens` and
        `demonstrated_tokens` are counts. The others are means over sampled tokens (`kl` and
        `entropy` in nats), but `cross_entropy`, in nats, is a mean over demonstrated tokens. Means
        over sampled or demonstrated tokens are absent if there are no such tokens.
        """
        metrics = {
            "loss": float(self._loss) / max(self._updates, 1),
            "grad_norm": float(self._norm),
            "importance_max": float(self._importance_max),
            "tokens": float(self._sampled + self._demonstrated),
            **{name: float(value) / self._sampled for name, value in self._sums.items()},
        }
        if self._demonstrated:
            metrics["demonstrated_tokens"] = float(self._demonstrated)
            metrics["cross_entropy"] = float(self._cross_entropy) / self._demonstrated
        return metrics
