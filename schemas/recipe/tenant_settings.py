"""The settings of a tenant."""

from __future__ import annotations

from pydantic import Field

from headrace.schemas.recipe.tables import NotNegative, Settings


class Tenant(Settings):
    """What a tenant may use. A task names its tenant."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the live episodes, compared with those of other tenants that have tasks."""
    live_episodes: NotNegative | None = None
    """Maximum number of its training episodes that run at the same time, and of its evaluation
    episodes, too. 0: its tasks wait. Absent: no limit of its own."""
