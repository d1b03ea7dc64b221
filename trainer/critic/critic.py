"""The value head: its parameters, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.schemas.recipe.learning.critic_settings import CriticSettings
from headrace.trainer.collate import Inputs
from headrace.trainer.critic.estimates import estimate, normalized, value_metrics
from headrace.trainer.optimizer_state import above, optimizer_tensors, restore_optimizer, under
from headrace.trainer.ranks.ranks import Ranks
from headrace.trainer.update_plan import UpdatePlan


class Critic:
    """A linear value head on the last hidden states of the policy, in float32.

    With h a hidden state of width H, x = h / sqrt(mean(h^2)) and the parameters w and b:

        V = w * x / H + b

    Because of both divisions a learning rate means the same for every model. At first V is 0.
    """

    def __init__(
        self,
        settings: CriticSettings,
        width: int,
        device: torch.device,
        betas: tuple[float, float],
    ) -> None:
        """`width` is H."""
        self._settings = settings
        self.updates_done = 0
        """Updates of the head since version 0."""
        self._weights = nn.Parameter(torch.zeros(width + 1, device=device))
        """w and b."""
        self._optimizer = torch.optim.Adam([self._weights], settings.learning_rate, betas)

    @property
    def warming(self) -> bool:
        """Whether only the head learns from the next update with sampled tokens."""
        return self.updates_done < self._settings.warmup_updates

    def values(self, hidden: Tensor) -> Tensor:
        """Returns the values [N] float32 of hidden states [N, H]. Both have gradients."""
        normal = nn.functional.rms_norm(hidden.float(), hidden.shape[-1:])
        return normal @ self._weights[:-1] / hidden.shape[-1] + self._weights[-1]

    def read_values(self, inputs: Inputs, hidden: Tensor) -> Tensor:
        """Returns the values [N] of the tokens of a micro-batch."""
        return self.values(hidden)

    def estimate(self, plans: Sequence[UpdatePlan]) -> dict[str, float]:
        """Gives a batch's updates their returns and advantages. Returns metrics of all of them.

        The plans have the values already. One without sampled tokens gets nothing.
        """
        chosen = [one for one in plans if not bool(one.demonstrated.all())]
        if not chosen:
            return {}
        found = []
        for plan in chosen:
            assert plan.values is not None, "the learner reads the values before it asks for these"
            values = plan.values.double().cpu().numpy()
            found.append(estimate(self._settings, plan.sequences, values))
        for plan, one in zip(
            chosen, normalized(found) if self._settings.normalize else found, strict=True
        ):
            plan.use(one)
        return value_metrics(found)

    def terms(self, hidden: Tensor, plan: UpdatePlan, tokens: Tensor) -> Tensor:
        """Returns the loss of the values of N hidden states [N, H], with gradient, [N].

        `tokens` [N] are the indices of their tokens in the update. The gradient by the hidden
        states is multiplied by the recipe's `coefficient`, the gradient by the head's parameters
        is not. While the critic warms up, the hidden states have no gradient.
        """
        assert plan.values is not None, "`estimate` has read them"
        assert plan.returns is not None, "`estimate` has given them, because a token was sampled"
        factor = 0.0 if self.warming else self._settings.coefficient
        scale: Any = _ScaledGradient.apply
        scaled = scale(hidden, factor) if factor else hidden.detach()
        known = plan.values[tokens], plan.returns[tokens]
        return value_terms(self.values(scaled), *known, self._settings.clip)

    def share_gradient(self, ranks: Ranks) -> None:
        """Adds up the gradient over the ranks. Call it after an update with sampled tokens."""
        if ranks.several:
            own = self._weights.grad
            self._weights.grad = ranks.sum(torch.zeros_like(self._weights) if own is None else own)

    def clip_gradient(self, maximum: float) -> Tensor:
        """Scales the gradient down to this norm. Returns the norm that it had, a scalar."""
        return nn.utils.clip_grad_norm_([self._weights], maximum)

    def step(self) -> None:
        """Makes one update, if there is a gradient."""
        if self._weights.grad is not None:
            self.updates_done += 1
            self._optimizer.step()
            self.drop_gradient()

    def drop_gradient(self) -> None:
        """Forgets the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Returns all that training continues from. The tensors share the critic's memory."""
        own = {"weights": self._weights, "updates_done": torch.tensor(self.updates_done)}
        return own | above("optimizer", optimizer_tensors(self._optimizer))

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state` returned. Raises UsageError if it is of another critic, or none."""
        weights = state.get("weights")
        if weights is None or weights.shape != self._weights.shape:
            raise UsageError(
                "the checkpoint has no critic, or that of another model. Use the recipe of the run "
                "that wrote it, or start a new namespace"
            )
        with torch.no_grad():
            self._weights.copy_(weights)
        self.updates_done = int(state["updates_done"])
        restore_optimizer(self._optimizer, under("optimizer", state))


def value_terms(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Returns the loss of each value, [N], from new and old values and returns, [N].

        term = max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2) / 2

    The square is that of PPO (arXiv 1707.06347), equation 9. The clip is in its authors' code only.
    Without a clip the term is (V - R)^2 / 2.
    """
    squares = (values - returns).square()
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        squares = torch.maximum(squares, (clipped - returns).square())
    return squares / 2


class _ScaledGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
