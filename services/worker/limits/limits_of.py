"""The limits of a recipe that workers share. Pure.

A limit has units. Each unit allows one thing at a time. A call in flight holds a unit until it
ends. If the limit has a period, a call holds its unit until the period has passed since it began.
So at the end of any window of this length, all calls that began in it hold a unit each, and they
are never more than the units.

The scheduler divides the units among the workers (`services/scheduler/limits/limit_division.py`),
and each worker uses its share under a lease (`held_limits.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.events import LimitSet
from headrace.schemas.recipe.recipe import Recipe

LEASE_S = 6.0
"""Seconds that a worker may use its shares after it sent the last report that was delivered. A
worker that can't reach the broker for so long has lost its partitions, too."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What a recipe says about a limit."""

    units: int
    period_ms: int = 0
    """How long a unit stays in use after its call has begun. 0: until the call has ended."""

    @property
    def period_s(self) -> float:
        """The same in seconds."""
        return self.period_ms / 1000


def new_value(limit: Limit, event: LimitSet) -> Limit:
    """Returns a limit after an operator has set it. Without a new period it keeps its own."""
    return Limit(event.units, (event.period_ms or limit.period_ms) if limit.period_ms else 0)


def call_limits(recipe: Recipe, policy: str) -> dict[str, Limit]:
    """Returns the limits of the calls of a policy's model, by name."""
    settings = recipe.policies[policy].limits
    limits = {}
    if settings.in_flight is not None:
        limits[f"policies.{policy}.limits.in_flight"] = Limit(settings.in_flight)
    if settings.calls is not None:
        period_ms = max(1, round(1000 * settings.period_s))
        limits[f"policies.{policy}.limits.calls"] = Limit(settings.calls, period_ms)
    return limits


def environment_limits(recipe: Recipe) -> dict[str, Limit]:
    """Returns the limits of live episodes by environment and by image. The scheduler keeps them."""
    settings = recipe.scheduler
    limits = {f"scheduler.environments.{key}": most for key, most in settings.environments.items()}
    limits |= {f"scheduler.images.{image}": most for image, most in settings.images.items()}
    return {name: Limit(most) for name, most in limits.items()}


def limits_of_use(recipe: Recipe, environment: str, image: str) -> tuple[str, str]:
    """Returns the names of the limits that an episode would count for, if the recipe has them.

    `image` is that of the task. If it is empty, the recipe's image counts.
    """
    known = recipe.environments.get(environment)
    of_recipe = known.options.get("image", "") if known is not None else ""
    return f"scheduler.environments.{environment}", f"scheduler.images.{image or of_recipe}"


def all_limits(recipe: Recipe) -> dict[str, Limit]:
    """Returns all limits of a recipe that workers share, by name."""
    found: dict[str, Limit] = {}
    for policy in recipe.policies:
        found |= call_limits(recipe, policy)
    return found
