"""Which tasks are cancelled. No log, no clock."""

from __future__ import annotations

from headrace.schemas.events import TaskCancelled, TaskSubmitted

TaskId = tuple[str, str]
"""A task's source, and its id there."""
KEPT = 100_000
"""Cancellations remembered; beyond it the oldest is forgotten."""


class CancelledTasks:
    """The newest cancellations, by the task they mean: of two for one task the first counts."""

    def __init__(self) -> None:
        self._reasons: dict[TaskId, str] = {}

    def add(self, event: TaskCancelled) -> bool:
        """Takes one in. False where the task is cancelled already."""
        task = event.source, event.task_id
        if task in self._reasons:
            return False
        if len(self._reasons) >= KEPT:
            del self._reasons[next(iter(self._reasons))]
        self._reasons[task] = event.reason
        return True

    def reason(self, submitted: TaskSubmitted) -> str | None:
        """Why a task is cancelled, perhaps in no words; None where it is not."""
        return self._reasons.get(id_of(submitted))


def id_of(event: TaskSubmitted | TaskCancelled) -> TaskId:
    """What both call the task."""
    return event.source, event.task_id
