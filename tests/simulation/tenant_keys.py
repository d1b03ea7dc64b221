"""Tenants with keys in a whole run: what they and an operator sign counts, and what others forge.

The run's own tasks are of a tenant without keys. `team` has a key, and its tasks run. `other` has
one, and no live episodes, so its tasks wait until a cancellation counts: a run in which a signed
cancellation is lost never drains.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.schemas.events import TaskCancelled, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from tests.simulation.forgeries import PUBLIC

REQUESTS = "requests"
"""An act: somebody writes tasks and cancellations of tenants with keys. Some are forged."""
REFUSED_LIMITS: dict[str, tuple[int, ...]] = {
    "headrace.services.scheduler.refused_tasks:UNPROVED_LIVE": (1, 3, 32),
    "headrace.services.scheduler.refused_tasks:REFUSED_LIVE": (1, 3, 512),
    "headrace.services.scheduler.service:UNRECORDED_HIGH": (2, 100_000),
}
"""Module constants and what they may be in such a run."""
SOURCE = "requests"
ENOUGH_SLOTS = 8


def with_keys(recipe: Recipe) -> Recipe:
    """The recipe, with keys of two tenants and of an operator.

    It has slots for the tasks of the tenants as well, so that none waits as long as it may live.
    """
    tree = recipe.model_dump(mode="json")
    slots = tree["environments"]["default"]["slots"]
    tree["environments"]["default"]["slots"] = max(slots, ENOUGH_SLOTS)
    tree["scheduler"]["operators"] = [PUBLIC["operator"]]
    tree["scheduler"]["tenants"] |= {
        "team": {"keys": [PUBLIC["team"]]},
        "other": {"keys": [PUBLIC["other"]], "live_episodes": 0},
    }
    return Recipe.model_validate(tree)


def has_keys(recipe: Recipe) -> bool:
    """Whether somebody has keys in a recipe."""
    return bool(recipe.scheduler.operators)


@dataclass(frozen=True)
class Request:
    """A request that was written."""

    event: TaskSubmitted | TaskCancelled
    who: str
    """Whose signature it has that counts here; empty if it has none."""
    offset: int

    def acts_for(self, tenant: str) -> bool:
        """Whether it counts for a tenant."""
        return self.who in (tenant, "operator")
