"""Checks that a policy can learn from pairs of samples, as far as the recipe shows it."""

from __future__ import annotations

from headrace.schemas.recipe.policy import DPO, Training
from headrace.schemas.recipe.tables import use_and_options


def check_pairs(name: str, training: Training, samples: int) -> None:
    """Raises ValueError if the loss of the policy `name` would find no pairs, or wrong ones.

    `samples` is the number of samples of a task.
    """
    if training.external or use_and_options(training.loss)[0] != DPO:
        return
    if training.critic is not None:
        raise ValueError(
            f"{name}.training.critic: the loss {DPO!r} compares the rewards of samples, and a "
            "critic would replace them by its estimates. Remove `critic`"
        )
    if samples <= training.minibatches:
        raise ValueError(
            f"{name}.training: the loss {DPO!r} learns from pairs of samples of a task, but of "
            f"{samples} samples in {training.minibatches} minibatches no two are in the same one. "
            "Raise tasks.samples, or lower `minibatches`"
        )
