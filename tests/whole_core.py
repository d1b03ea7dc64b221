"""The scheduler's core with the whole tasks, which its shell reads from the log."""

from __future__ import annotations

from headrace.schemas.events import EpisodeStarted, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.scheduler.core import SchedulerCore


class WholeCore(SchedulerCore):
    """Keeps each task, and starts it as the shell does."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._tasks: dict[int, TaskSubmitted] = {}

    def on_task(self, number: int, submitted: TaskSubmitted, *, accepted: bool = False) -> None:
        """Takes a submitted task, and keeps it."""
        self._tasks[number] = submitted
        super().on_task(number, submitted, accepted=accepted)

    def on_forged(self, number: int, submitted: TaskSubmitted) -> None:
        """Takes a task that no key of its tenant has signed, and keeps it."""
        self._tasks[number] = submitted
        self.on_unproved(number)

    def next_start(self, now_s: float) -> list[EpisodeStarted]:
        """The starts of all samples of the next task, or an empty list if no task may start."""
        chosen = self.choose(now_s)
        return [] if chosen is None else self.starts(chosen, self._tasks[chosen.number], now_s)
