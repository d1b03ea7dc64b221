"""Limits that hold over all processes of a run together."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace.schemas.recipe.tables import NotNegative, Positive, PositiveSeconds, Settings
from headrace.schemas.untrusted.public_keys import PublicKeys


class Tenant(Settings):
    """What a tenant may use. A task names its tenant."""

    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Its share of the live episodes, compared with those of other tenants that have tasks."""
    live_episodes: NotNegative | None = None
    """Maximum number of its training episodes that run at the same time, and of its evaluation
    episodes, too. 0: its tasks wait. Absent: no limit of its own."""
    keys: PublicKeys = ()
    """Public keys of who may act for the tenant, as `headrace keys new` prints them. With keys, a
    task or a cancellation counts only if one of them, or one of `scheduler.operators`, has signed
    it. Empty: everybody may act for the tenant who may write `tasks`."""


class CallLimits(Settings):
    """The most calls of a model, over all inference workers together. `headrace quota` changes what
    is set here during a run. Each prompt is a call, also one of an evaluation or for a teacher."""

    in_flight: Positive | None = None
    """Maximum number of calls that run at the same time. Absent: as many as the engines have slots.
    """
    calls: Positive | None = None
    """Maximum number of calls that begin within any `period_s`. Absent: no limit."""
    period_s: PositiveSeconds = 1.0
    """The time for `calls`, in seconds. If a unit of `calls` moves to another worker, it is used
    again after this time at the latest, so a short time is better."""

    @model_validator(mode="after")
    def _period_s_belongs_to_calls(self) -> CallLimits:
        if self.calls is None and self.period_s != 1.0:
            raise ValueError("period_s: it is the time for `calls`. Set `calls`, or remove it")
        return self
