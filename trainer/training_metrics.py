"""What a version's training says of itself, as numbers over all its trained tokens."""

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
        self._tokens = 0
        self._demonstrated = 0
        self._surprise = torch.zeros(())
        self._sums: dict[str, Tensor] = {}
        self._importance_max = torch.zeros(())

    def add(self, batch: MicroBatch, loss: Tensor, logprobs: Tensor, entropies: Tensor) -> None:
        """Takes what was drawn of a micro-batch in: its share of the loss, new logprobs [N] and
        entropies [N]."""
        settings = batch.settings
        ratio = (logprobs - batch.proximal).exp()
        lag = batch.proximal - batch.behaviour
        weights = importance(batch)
        clipped = (ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)
        sums = {
            # Of the policy that drew, from the one at the batch's start: estimator k3 of
            # Schulman, "Approximating KL divergence" (2020).
            "kl": (lag.exp() - 1 - lag).sum(),
            "entropy": entropies.sum(),
            "clip_fraction": clipped.float().sum(),
            "importance_mean": weights.sum(),
        }
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value.cpu()
        self._importance_max = torch.maximum(self._importance_max, weights.max().cpu())
        self._loss = self._loss + loss.cpu()
        self._tokens += len(logprobs)

    def add_demonstrated(self, loss: Tensor, logprobs: Tensor) -> None:
        """Takes what was demonstrated in a micro-batch in: its share of the loss, logprobs [N]."""
        self._loss = self._loss + loss.cpu()
        self._surprise = self._surprise - logprobs.sum().cpu()
        self._demonstrated += len(logprobs)

    def add_update(self, norm: Tensor) -> None:
        """Takes an update's gradient norm in, as it was before clipping."""
        self._norm = torch.maximum(self._norm, norm.cpu())
        self._updates += 1

    def finite(self) -> bool:
        """Whether loss and gradients are finite so far."""
        return bool(torch.isfinite(self._loss) and torch.isfinite(self._norm))

    def metrics(self) -> dict[str, float]:
        """By name: sums over updates for the loss's mean, means a token for the others.

        `cross_entropy`, in nats, is of the demonstrated tokens, and there only where some were.
        """
        metrics = {
            "loss": float(self._loss) / max(self._updates, 1),
            "grad_norm": float(self._norm),
            "importance_max": float(self._importance_max),
            "tokens": float(self._tokens + self._demonstrated),
            **{name: float(value) / self._tokens for name, value in self._sums.items()},
        }
        if self._demonstrated:
            metrics["demonstrated_tokens"] = float(self._demonstrated)
            metrics["cross_entropy"] = float(self._surprise) / self._demonstrated
        return metrics
