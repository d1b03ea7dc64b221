"""Follows `cancellations` for all shards of an agent worker.

The topic has one partition, and a worker many: it is read once, whole, by each worker. Nothing
depends on when: an outcome in the log stands, and whoever owns an episode that has none reads the
same cancellations before or after its start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from headrace.schemas.events import TaskCancelled, TaskSubmitted
from headrace.schemas.topics import CANCELLATIONS
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import follow_events
from headrace.services.tasks.cancelled import CancelledTasks, TaskId, id_of

OnCancelled = Callable[[TaskId, str], None]
"""Told a task and the reason."""


class Cancellations:
    """What is cancelled, and whom to tell."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._tasks = CancelledTasks()
        self._told: dict[OnCancelled, None] = {}

    def reason(self, submitted: TaskSubmitted) -> str | None:
        """Why a task is cancelled, perhaps in no words; None where it is not."""
        return self._tasks.reason(submitted)

    def tell(self, shard: OnCancelled) -> None:
        """Tells a shard each task that is cancelled from now on."""
        self._told[shard] = None

    def forget(self, shard: OnCancelled) -> None:
        """Tells it nothing any more."""
        self._told.pop(shard, None)

    async def follow(self) -> None:
        """Reads the topic, for ever. DependencyError where the log is out of reach."""
        cancellations = self._log.topics.partition(CANCELLATIONS)
        async with aclosing(follow_events(self._log, {cancellations: "first"})) as items:
            async for item in items:
                if isinstance(item, Delivery) and isinstance(item.event, TaskCancelled):
                    self._on_cancelled(item.event)

    def _on_cancelled(self, event: TaskCancelled) -> None:
        if self._tasks.add(event):
            for tell in list(self._told):
                tell(id_of(event), event.reason)
