"""The names of the services. This module imports next to nothing: `--help` answers at once."""

from __future__ import annotations

from collections.abc import Collection

SERVICES = (
    "source", "evaluation", "scheduler", "agent", "gateway", "env", "inference",
    "assemble-groups", "assemble-batches", "item-statistics", "project-turns", "trainer",
)  # fmt: skip
POLICY_SERVICES = ("inference", "assemble-batches", "item-statistics", "trainer")
"""Services of which a process may serve one policy."""


def pool_name(service: str, policy: str = "") -> str:
    """Returns the name of the workers of a service, or of those that serve only one policy."""
    return f"{service}-{policy}" if policy else service


def known_pools(policies: Collection[str]) -> list[str]:
    """Returns the names of all pools that a run with these policies can have."""
    several = policies if len(policies) > 1 else ()
    return [*SERVICES, *(pool_name(one, name) for name in several for one in POLICY_SERVICES)]
