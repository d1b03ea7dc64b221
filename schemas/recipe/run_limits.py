"""How much of a run happens at the same time, in the recipe."""

from __future__ import annotations

from pydantic import Field

from headrace.schemas.recipe.tables import NotNegative, Positive, Settings


class Scheduler(Settings):
    """Limits of what runs at the same time."""

    live_episodes: Positive | None = None
    """Maximum number of training episodes that run at the same time. Absent: as many as a batch
    has, without those that it replays: `batches.groups` times `tasks.samples`. Of several policies,
    the largest batch counts."""
    evaluation_episodes: Positive = 128
    """Maximum number of evaluation episodes that run at the same time, in addition to those."""
    starts_per_s: float | None = Field(default=None, gt=0)
    """Maximum number of episodes that start in a second. Absent: no limit."""
    duplicates_window: Positive = 1_000_000
    """A second submission of a task id is recognised within this many tasks."""


class Workers(Settings):
    """How many processes of each kind `run` starts."""

    agent: NotNegative = 1
    """Number of agent workers."""
    env: NotNegative = 1
    """Number of env workers. None is started if every environment is external."""
    inference: NotNegative = 1
    """Number of inference workers."""
