"""The loss against numbers worked out by hand, and against a naive reference's gradient."""

from __future__ import annotations

from math import exp, log
from typing import Any

import pytest
import torch

from headrace.schemas.recipe.policy import Training
from headrace.services.base.plugins import load
from headrace.trainer.losses import LOSSES, Loss, MicroBatch, entropy_bonus, grpo


def micro_batch(
    behaviour: list[float],
    proximal: list[float],
    advantages: list[float],
    denominator: int,
    **settings: Any,
) -> MicroBatch:
    return MicroBatch(
        torch.tensor(behaviour),
        torch.tensor(proximal),
        torch.tensor(advantages),
        denominator,
        Training(**settings),
    )


def test_on_policy_it_is_the_policy_gradient() -> None:
    """Ratio and weight are 1: the loss is -mean(advantage), its gradient -advantage / n."""
    new = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    batch = micro_batch([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5], [1.0, -0.5, 2.0], 3)

    loss = grpo(batch, new)
    [gradient] = torch.autograd.grad(loss, new)

    assert loss.item() == pytest.approx(-2.5 / 3)
    assert gradient.tolist() == pytest.approx([-1 / 3, 0.5 / 3, -2 / 3])


def test_a_ratio_beyond_the_clip_has_no_gradient_where_it_would_go_further() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 with clip 0.2 below and 0.3 above; advantages +, -, -, +.

    The surrogates: min(1.5, 1.3), min(-0.5, -0.8), min(-1.5, -1.3), min(0.5, 0.8).
    """
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5])
    new = ratios.log().requires_grad_()
    batch = micro_batch([0.0] * 4, [0.0] * 4, [1, -1, -1, 1], 10, clip_low=0.2, clip_high=0.3)

    loss = grpo(batch, new)
    [gradient] = torch.autograd.grad(loss, new)

    assert loss.item() == pytest.approx(-(1.3 - 0.8 - 1.5 + 0.5) / 10)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 0.15, -0.05])


def test_the_importance_weight_is_truncated_above_only() -> None:
    """proximal / behaviour is 8, 1.5 and 0.1; the cap is 2."""
    behaviour = [-log(8), -log(1.5), -log(0.1)]
    batch = micro_batch(behaviour, [0.0] * 3, [1.0] * 3, 1, importance_cap=2.0)
    assert grpo(batch, torch.zeros(3)).item() == pytest.approx(-(2.0 + 1.5 + 0.1))


def test_micro_batches_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    behaviour, proximal, new = (-torch.rand(3, 12)).unbind()
    advantages = torch.randn(12)

    def part(chosen: slice) -> torch.Tensor:
        batch = MicroBatch(behaviour[chosen], proximal[chosen], advantages[chosen], 12, Training())
        return grpo(batch, new[chosen])

    whole = part(slice(None))
    assert whole.item() == pytest.approx(sum(part(s).item() for s in (slice(5), slice(5, 12))))


def test_the_entropy_bonus_is_a_mean_over_the_whole_updates_tokens() -> None:
    """Two of eight tokens lie in this micro-batch; the coefficient is 0.1."""
    batch = micro_batch([0.0] * 2, [0.0] * 2, [0.0] * 2, 8, entropy_bonus=0.1)
    assert entropy_bonus(batch, torch.tensor([1.0, 0.5])).item() == pytest.approx(0.1 * 1.5 / 8)


def naive(batch: MicroBatch, new: torch.Tensor) -> torch.Tensor:
    """The formula token by token, as the papers write it."""
    total = torch.zeros(())
    settings = batch.settings
    for index in range(len(new)):
        weight = min(
            exp(batch.proximal[index].item() - batch.behaviour[index].item()),
            settings.importance_cap,
        )
        ratio = torch.exp(new[index] - batch.proximal[index])
        advantage = batch.advantages[index]
        clipped = torch.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
        total = total + weight * torch.min(ratio * advantage, clipped * advantage)
    return -total / batch.denominator


def test_loss_and_gradient_are_those_of_the_naive_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    behaviour, proximal = -3 * torch.rand(2, 200, generator=generator)
    advantages = torch.randn(200, generator=generator)
    new = (proximal + 0.5 * torch.randn(200, generator=generator)).requires_grad_()
    batch = MicroBatch(behaviour, proximal, advantages, 250, Training(clip_high=0.28))

    fast, slow = grpo(batch, new), naive(batch, new)

    assert fast.item() == pytest.approx(slow.item(), rel=1e-5)
    [fast_gradient], [slow_gradient] = (
        torch.autograd.grad(fast, new),
        torch.autograd.grad(slow, new),
    )
    torch.testing.assert_close(fast_gradient, slow_gradient)


def test_the_loss_is_found_by_name_and_by_path() -> None:
    by_name: Loss = load("loss", "grpo", LOSSES)
    assert by_name is grpo
    assert load("loss", "headrace.trainer.losses:grpo", LOSSES) is grpo
