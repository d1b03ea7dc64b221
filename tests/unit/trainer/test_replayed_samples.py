"""A replayed sample is an older one: its loss is corrected from the engine's logprobs, its weight
counts once, and the metrics of fresh samples do not mix with its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.schemas.packed import pack_f32, pack_spans
from headrace.trainer.loader import build_updates
from headrace.trainer.losses.grpo_loss import GrpoLoss
from headrace.trainer.losses.load_loss import load_loss
from headrace.trainer.metrics.batch_metrics import staleness, trained_episodes
from headrace.trainer.metrics.training_metrics import Totals
from headrace.trainer.sequences import UpdateBatch
from headrace.trainer.update_plan import UpdatePlan
from tests.unit.trainer.test_loader import batch_of, recorded
from tests.unit.trainer.test_losses import CPU, evaluate, update_of

WIDE: dict[str, dict[str, Any]] = {
    "grpo": {"importance_cap": 1e9},
    "dr_grpo": {"importance_cap": 1e9},
    "gspo": {"clip_low": 1.0, "clip_high": 1e9},
    "cispo": {"clip_high": 1e9},
    "icepop": {"mask_low": 0.0, "mask_high": 1e9},
    "m2po": {"threshold": 1e9},
    "reinforce": {"importance_cap": 1e9},
}
"""The losses that learn from rewards, with options that clip and truncate nothing."""


@pytest.mark.parametrize("name", WIDE)
def test_the_expected_gradient_of_a_replayed_token_is_that_of_the_policy(name: str) -> None:
    """Over all actions of one state, each weighed by the probability that the old policy drew it.

    That is the gradient of the expected advantage under the new policy: importance sampling.
    """
    random = np.random.default_rng(4)
    logits, old = (torch.tensor(random.normal(size=6)) for _ in range(2))
    logits.requires_grad_()
    new, behaviour = logits.log_softmax(-1), old.log_softmax(-1)
    update, _ = update_of([1] * 6, seed=0)
    update = UpdateBatch([replace(one, use=1) for one in update.sequences], newest=9)
    plan = UpdatePlan(update, [[0]], GrpoLoss(), CPU, read=0)
    batch = replace(plan.tokens(torch.arange(6), new.detach()), behaviour=behaviour)
    assert (batch.uses == 1).all()
    assert (batch.staleness > 5).all()
    loss = load_loss({"use": name, **WIDE[name]})
    if loss.prepares:
        batch = replace(batch, state=loss.prepare(batch, new.detach()))

    terms = loss.terms(batch, new)

    [found] = torch.autograd.grad((behaviour.exp() * terms).sum(), logits, retain_graph=True)
    gained = (new.exp() * batch.advantages).sum()
    [expected] = torch.autograd.grad(-gained, logits)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def of_a_batch(weight: float, use: int) -> UpdateBatch:
    """An update of a fresh sample, and of one that was sampled long ago."""
    events = [recorded(0, 3), recorded(1, 4)]
    batch = batch_of([3, 4])
    fresh, again = batch.samples
    again = again.model_copy(update={"use": use, "weight": weight})
    [update], dropped = build_updates(
        batch.model_copy(update={"samples": (fresh, again)}), events, 100, 1
    )
    assert not dropped
    return update


@pytest.mark.parametrize("name", [*WIDE])
def test_the_weight_of_a_replayed_sample_counts_once(name: str) -> None:
    loss = load_loss({"use": name, **WIDE[name]})
    proximal = np.linspace(-0.9, -0.2, 7)
    new = proximal + 0.01
    whole = evaluate(loss, of_a_batch(1.0, 0), proximal, new)[1]
    half = evaluate(loss, of_a_batch(0.5, 1), proximal, new)[1]
    assert whole[3:].abs().min() > 0
    torch.testing.assert_close(half[:3], whole[:3])
    torch.testing.assert_close(half[3:], 0.5 * whole[3:])


def test_metrics_of_fresh_samples_leave_replayed_ones_out() -> None:
    update = of_a_batch(1.0, 1)
    behaviour = np.concatenate([one.behaviour for one in update.sequences]).astype(np.float64)
    lag = np.array([0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0])
    totals = Totals(GrpoLoss())
    evaluate(GrpoLoss(), update, behaviour + lag, behaviour + lag, totals=totals)
    metrics = totals.metrics()
    assert metrics["effective_sample_size"] == pytest.approx(1.0), "the fresh weights are equal"
    weights = np.exp(lag[3:])
    assert metrics["effective_sample_size_replayed"] == pytest.approx(
        weights.sum() ** 2 / (4 * (weights**2).sum())
    )


def test_staleness_and_episodes_are_those_of_fresh_samples() -> None:
    """Batch 5 starts from version 4. The fresh tokens are of version 3, the replayed one of 1."""
    batch = batch_of([3, 4, 2])
    samples = [
        one.model_copy(update={"use": use})
        for one, use in zip(batch.samples, (0, 0, 1), strict=True)
    ]
    batch = batch.model_copy(update={"samples": tuple(samples)})
    events = [recorded(index, tokens) for index, tokens in enumerate((3, 4, 2))]
    object.__setattr__(events[2].turns[0], "versions", pack_spans([1, 1]))
    updates, _ = build_updates(batch, events, 100, 1)
    assert staleness(batch, updates) == {
        "staleness_mean": 1.0,
        "staleness_max": 1.0,
        "staleness_oldest": 1.0,
        "staleness_replayed": 3.0,
        "replayed": pytest.approx(1 / 3),
    }
    events = [one.model_copy(update={"reward": 1.0}) for one in events]
    assert [one.tokens for one in trained_episodes(batch, events, {0, 1, 2})] == [3, 4]


def test_a_replayed_sample_with_a_defect_costs_only_itself() -> None:
    batch = batch_of([3, 4])
    spoiled = batch.samples[1].model_copy(
        update={"use": 1, "advantages": pack_f32([1.0, 2.0, 3.0])}
    )
    batch = batch.model_copy(update={"samples": (batch.samples[0], spoiled)})
    [update], dropped = build_updates(batch, [recorded(0, 3), recorded(1, 4)], 100, 1)
    assert [one.sample for one in update.sequences] == [0]
    assert len(dropped) == 1
