"""What `mode = "sync"` sets in a recipe, and what contradicts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.schemas.recipe.policy import Policy

ON_POLICY = {"max_staleness": 0, "prefetch": 0}
"""What it sets in `policies.NAME.batches`."""


def with_sync(tree: Any) -> Any:
    """Returns a recipe's tree with the keys that `mode = "sync"` sets, if they are absent.

    Leaves a tree of another mode or of a wrong type as it is.
    """
    if not isinstance(tree, Mapping) or tree.get("mode") != "sync":
        return tree
    policies = tree.get("policies")
    if not isinstance(policies, Mapping):
        return tree
    filled: dict[Any, Any] = {}
    for name, policy in policies.items():
        filled[name] = policy
        if isinstance(policy, Mapping) and isinstance(policy.get("batches", {}), Mapping):
            filled[name] = {**policy, "batches": {**ON_POLICY, **policy.get("batches", {})}}
    return {**tree, "policies": filled}


def check_sync(policies: Mapping[str, Policy], live: int, batch: int) -> None:
    """Raises ValueError if a key contradicts `mode = "sync"`.

    `live` is the largest number of live episodes, and `batch` the number of episodes of a batch.
    """
    for name, policy in policies.items():
        for key, value in ON_POLICY.items():
            if (found := getattr(policy.batches, key)) != value:
                raise ValueError(
                    f'policies.{name}.batches.{key}: {found} contradicts mode = "sync", which sets '
                    f"it to {value}. Remove one of them"
                )
    if live > batch:
        raise ValueError(
            f'scheduler.live_episodes: {live} contradicts mode = "sync", which starts only the '
            f"{batch} episodes of a batch. Remove one of them"
        )
