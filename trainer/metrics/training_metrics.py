"""Sums up the metrics of one version's training over its micro-batches and updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.trainer.losses.loss import Loss, MicroBatch
from headrace.trainer.losses.objective import Objective
from headrace.trainer.ranks.ranks import ALONE, Ranks

EFFECTIVE_SAMPLE_SIZES = ("effective_sample_size", "effective_sample_size_replayed")
"""The metrics of the tokens of fresh samples, and of replayed ones."""
MAX_LAG = 20.0
"""Importance weights above exp(20) are taken for exp(20) in metrics, so that sums stay finite."""


class Totals:
    """Sums over the micro-batches and updates of one version."""

    def __init__(self, loss: Loss, ranks: Ranks = ALONE) -> None:
        self._by = loss
        self._ranks = ranks
        self._cap: float | None = getattr(loss, "importance_cap", None)
        self._loss = torch.zeros(())
        self._norm = torch.zeros(())
        self._critic_norms: list[Tensor] = []
        self._updates = self._read = 0
        self._meant = self._clipped = 0
        """Of the current update: tokens with an advantage, and those without a gradient."""
        self._masked = 0
        self._rate: float | None = None
        self._sampled = 0
        self._demonstrated = 0
        self._cross_entropy = torch.zeros(())
        self._sums: dict[str, Tensor] = {}
        self.known: dict[str, float] = {}
        """Metrics that are known before the first update: those of the critic's estimates."""
        self._weights = {
            name: torch.zeros(3, dtype=torch.float64) for name in EFFECTIVE_SAMPLE_SIZES
        }
        """Number, sum and sum of squares of the importance weights before they are truncated."""
        self._importance_max = torch.zeros(())
        self._engine_gaps: list[Tensor] = []
        """By micro-batch: trainer's minus engine's logprobs of the tokens of staleness 0."""

    def add(
        self, batch: MicroBatch, objective: Objective, logprobs: Tensor, entropies: Tensor
    ) -> None:
        """Adds a micro-batch's sampled tokens: new `logprobs` and `entropies` are [N] in nats."""
        lag = batch.proximal - batch.behaviour
        raw = lag.double().clamp(max=MAX_LAG).exp()
        weights = raw if self._cap is None else raw.clamp(max=self._cap)
        clipped = (objective.gradient == 0) & (batch.advantages != 0)
        if not self._by.clips:
            clipped = torch.zeros_like(clipped)
        self._meant += int((batch.advantages != 0).sum())
        self._clipped += int(clipped.sum())
        below = self._by.log_ratio(batch, logprobs) < 0
        sums = {
            # KL divergence of the policy that sampled from the proximal policy, by estimator k3
            # of Schulman, "Approximating KL Divergence" (2020).
            "kl": (lag.exp() - 1 - lag).sum(),
            "entropy": entropies.sum(),
            "clip_fraction": clipped.sum(),
            "clip_low_fraction": (clipped & below).sum(),
            "clip_high_fraction": (clipped & ~below).sum(),
            "importance_mean": weights.sum(),
        }
        if objective.divergence is not None:
            sums["reference_kl"] = objective.divergence.sum()
        if batch.teacher is not None:
            sums["teacher_kl"] = (batch.behaviour - batch.teacher).sum()
        if self._cap is not None:
            sums["importance_truncated"] = (raw > self._cap).sum()
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0) + value.cpu()
        kinds = (batch.uses == 0, batch.uses > 0)
        for name, chosen in zip(EFFECTIVE_SAMPLE_SIZES, kinds, strict=True):
            part = raw[chosen]
            sums_of = (torch.tensor(len(part)), part.sum().cpu(), part.square().sum().cpu())
            self._weights[name] = self._weights[name] + torch.stack(sums_of)
        self._importance_max = torch.maximum(self._importance_max, weights.max().float().cpu())
        self._engine_gaps.append(lag[batch.staleness == 0].cpu())
        self._loss = self._loss + objective.value.cpu()
        self._sampled += len(logprobs)

    def add_demonstrated(self, loss: Tensor, logprobs: Tensor) -> None:
        """Adds a micro-batch's demonstrated tokens: their part of the loss, and logprobs [N]."""
        self._loss = self._loss + loss.cpu()
        self._cross_entropy = self._cross_entropy - logprobs.sum().cpu()
        self._demonstrated += len(logprobs)

    def add_values(self, terms: Tensor) -> None:
        """Adds the critic's loss for a micro-batch's sampled tokens, [N]."""
        self._sums["value_loss"] = self._sums.get("value_loss", 0) + terms.sum().cpu()

    def add_update(self, norm: Tensor, read: int) -> None:
        """Adds an update by the norm of its gradient before clipping, a scalar.

        `read` is how many tokens its sequences have, over all ranks.
        """
        self._norm = torch.maximum(self._norm, norm.cpu())
        self._updates += 1
        self._read += read
        meant, clipped = self._ranks.sum(torch.tensor([self._meant, self._clipped])).tolist()
        self._masked += 0 < meant == clipped
        self._meant = self._clipped = 0

    def add_rate(self, rate: float) -> None:
        """Notes the learning rate of an update that changes the weights."""
        self._rate = rate

    def add_critic(self, norm: Tensor) -> None:
        """Adds an update of the critic by the norm of its gradient before clipping, a scalar."""
        self._critic_norms.append(norm.cpu())

    def finite(self) -> bool:
        """Returns whether losses and gradients have been finite so far."""
        values = self._sums.get("value_loss", torch.zeros(()))
        known = torch.stack([self._loss, self._norm, values, *self._critic_norms])
        return bool(torch.isfinite(self._ranks.sum(known)).all())

    def _merge(self) -> None:
        """Adds what the other ranks have added. Norms and updates are those of all ranks anyway."""
        items: list[Any] = self._ranks.gather(
            (
                (self._loss, self._sampled, self._demonstrated, self._cross_entropy),
                self._sums, self._weights, self._importance_max, self._engine_gaps,
            )
        )  # fmt: skip
        counts, self._sums, self._weights, self._importance_max, self._engine_gaps = items[0]
        for more, sums, weights, importance_max, gaps in items[1:]:
            counts = tuple(one + another for one, another in zip(counts, more, strict=True))
            for name, value in sums.items():
                self._sums[name] = self._sums.get(name, 0) + value
            for name, value in weights.items():
                self._weights[name] = self._weights[name] + value
            self._importance_max = torch.maximum(self._importance_max, importance_max)
            self._engine_gaps += gaps
        self._loss, self._sampled, self._demonstrated, self._cross_entropy = counts

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name.

        `loss` is a mean over updates, `grad_norm` and `importance_max` are maxima, `learning_rate`
        is that of the last update and absent if there was none with a gradient, `masked_updates`
        counts the updates in which the loss clipped or masked every token, `tokens` and
        `demonstrated_tokens` are counts, of each epoch again, and so is `tokens_read`, the number
        of all tokens that the model reads without padding. Those of `_engine_metrics` are over
        fresh tokens. A critic adds those of `value_metrics`, the mean `value_loss`, and the maximum
        `critic_grad_norm`. The others are means over sampled tokens (`kl`, `reference_kl`,
        `teacher_kl` and `entropy` in nats), but `cross_entropy`, in nats, is a mean over
        demonstrated tokens, and `effective_sample_size` is (sum of w)^2 / (N * sum of w^2) with the
        importance weights w of the N tokens of fresh samples, before they are truncated;
        `effective_sample_size_replayed` is that of replayed samples. `teacher_kl` is an estimate of
        the divergence of the policy that sampled from its teacher. Means over tokens are absent if
        there are no such tokens. All ranks must call it once, and get the same.
        """
        self._merge()
        metrics = {
            "loss": float(self._loss) / max(self._updates, 1),
            "grad_norm": float(self._norm),
            "importance_max": float(self._importance_max),
            "tokens": float(self._sampled + self._demonstrated),
            "tokens_read": float(self._read),
            **{name: float(value) / self._sampled for name, value in self._sums.items()},
            **self.known,
        }
        if self._critic_norms:
            metrics["critic_grad_norm"] = float(torch.stack(self._critic_norms).max())
        if self._rate is not None:
            metrics["learning_rate"] = self._rate
        if self._sampled:
            for name, (count, total, squares) in self._weights.items():
                if count:
                    metrics[name] = float(total * total / (count * squares)) if squares else 0.0
            metrics |= self._engine_metrics() | {"masked_updates": float(self._masked)}
        if self._demonstrated:
            metrics["demonstrated_tokens"] = float(self._demonstrated)
            metrics["cross_entropy"] = float(self._cross_entropy) / self._demonstrated
        return metrics

    def _engine_metrics(self) -> dict[str, float]:
        """Returns how far apart engine and trainer are, on tokens that the newest version sampled.

        `engine_gap_mean` and `engine_gap_p99` are of the absolute difference of their logprobs, and
        `engine_kl` is the KL divergence, all in nats. Only numerics can make a difference.
        """
        gaps = torch.cat(self._engine_gaps)
        if not len(gaps):
            return {}
        size = gaps.abs()
        rank = max(0, -(-99 * len(size) // 100) - 1)
        return {
            "engine_gap_mean": float(size.mean()),
            "engine_gap_p99": float(size.sort().values[rank]),
            "engine_kl": float((gaps.exp() - 1 - gaps).mean()),
        }
