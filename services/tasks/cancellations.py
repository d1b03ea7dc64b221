"""Follows `cancellations` for all shards of an agent worker.

The topic has one partition, and a worker many: it is read once, whole, by each worker. Nothing
depends on when: an outcome in the log stands, and whoever owns an episode that has none reads the
same cancellations before or after its start.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.schemas.events import TaskCancelled, TaskSubmitted
from headrace.schemas.topics import CANCELLATIONS
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.event_reader import EventReader
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
        place = Partition(self._log.topics.name(CANCELLATIONS), 0)
        reader = EventReader(self._log, {place: "first"})
        try:
            async for item in reader:
                if isinstance(item, Delivery) and isinstance(item.event, TaskCancelled):
                    self._on_cancelled(item.event)
        finally:
            await reader.aclose()

    def _on_cancelled(self, event: TaskCancelled) -> None:
        if self._tasks.add(event):
            for tell in list(self._told):
                tell(id_of(event), event.reason)
