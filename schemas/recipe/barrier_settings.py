"""The barrier between policies in the recipe."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.tables import Positive, Settings


class BarrierSettings(Settings):
    """Keeps the versions of several policies together, so that they learn against one another and
    none runs ahead. Absent: each policy learns as fast as it can."""

    versions: Positive = 1
    """How many versions a policy may be ahead of the slowest one of the set. A policy waits with
    its next batch until the others have followed, unless they have nothing left to train on."""
    policies: tuple[str, ...] = ()
    """The set: at least two policies that learn. Empty: all that learn."""
    waiting_batches: Positive = 64
    """How many full batches of groups may wait for a policy that the barrier holds. If so many
    wait, no more tasks start. Once the live ones have ended and `batch_wait_s` has passed, the slow
    policy makes a batch of the groups that it has, even if it has none, and the others follow. A
    filter that keeps less than 1 of this number of groups gets short batches."""


def check_barrier(barrier: BarrierSettings | None, policies: Mapping[str, Policy]) -> None:
    """Raises ValueError if the set is not at least two of the policies that learn."""
    if barrier is None:
        return
    learning = [name for name, policy in policies.items() if policy.training is not None]
    chosen = barrier.policies or tuple(learning)
    if unknown := sorted(set(chosen) - set(learning)):
        raise ValueError(
            f"barrier.policies: no policy {unknown[0]!r} learns. Those that do are "
            f"{', '.join(sorted(learning)) or '(none)'}"
        )
    if len(set(chosen)) < 2:
        raise ValueError("barrier: it needs at least two policies that learn. Remove the table")
