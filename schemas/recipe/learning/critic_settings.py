"""The critic of a policy in the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from headrace.schemas.recipe.tables import Choice, NotNegative, Settings, use_and_options

REWARDS = "rewards"
"""The estimator that leaves the advantages to a critic."""


class CriticSettings(Settings):
    """A critic: a value head that estimates the rewards that are still to come (PPO with GAE).

    The table turns it on, and needs `groups.advantage = "rewards"`. The head reads the policy's own
    last hidden states, so it needs hardly any memory, and one forward pass more for each batch. It
    is in checkpoints, and never in published weights."""

    learning_rate: float = Field(default=0.05, gt=0)
    """Learning rate of the head, by Adam with `training.betas`. One update changes a value by at
    most about twice as much, however wide the model is."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """How much a reward counts for each sampled token that it comes later."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """The lambda of the advantages. 1 relies on the rewards alone. Below 1 there is less variance,
    but a token learns through the critic only from what comes more than 1 / (1 - lambda) sampled
    tokens later."""
    value_lambda: float = Field(default=1.0, ge=0, le=1)
    """The lambda of the returns that the critic learns. 1 makes them the sums of the rewards."""
    clip: float | None = Field(default=None, gt=0)
    """How far a value may move from what it was at the batch's start and still learn. Absent: as
    far as it likes. It has no effect in a batch of one update."""
    coefficient: float = Field(default=0.1, ge=0)
    """Coefficient of the value loss for the policy's weights, beside the policy's loss. With 0 only
    the head learns from it."""
    normalize: bool = True
    """Whether the advantages of a batch are shifted and scaled to mean 0 and deviation 1."""
    warmup_updates: NotNegative = 0
    """Number of first updates with sampled tokens in which only the head learns. The policy's
    weights and its learning rate stay as they are."""


def check_critic(
    critic: CriticSettings | None, advantage: Choice, filters: Sequence[Choice]
) -> None:
    """Raises ValueError for a critic without the rewards that it learns from, and the opposite.

    The trainer can't see what the numbers of a batch are.
    """
    estimator, _ = use_and_options(advantage)
    if critic is not None and estimator != REWARDS:
        raise ValueError(
            f"`training.critic` needs the rewards of the turns, but `groups.advantage` is "
            f'"{estimator}": set groups.advantage = "{REWARDS}", or remove `training.critic`'
        )
    if critic is None and estimator == REWARDS:
        raise ValueError(
            f'`groups.advantage` is "{REWARDS}", which needs a critic to make advantages of them: '
            "add the table `training.critic`, or choose another advantage"
        )
    if estimator == REWARDS and "zero_advantage" in [use_and_options(one)[0] for one in filters]:
        raise ValueError(
            'the filter "zero_advantage" would drop every group without a reward, from which a '
            "critic learns, too: remove it from `groups.filters`"
        )
