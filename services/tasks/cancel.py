"""Cancelling tasks, for `headrace cancel`: which they are, where they stand, and the events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeStarted, TaskCancelled, TaskEnded, TaskSubmitted
from headrace.schemas.topics import EPISODES, RESULTS, TASKS
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.tasks.cancelled import TaskId, id_of

IN_FLIGHT = 256
"""Cancellations that are written at once."""

State = Literal["queued", "running", "ended", "unknown"]


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """A task that somebody wants cancelled, as the log has it now."""

    source: str
    task_id: str
    number: int | None
    """None where no such task was submitted: the cancellation waits for it."""
    state: State


class TaskStatuses:
    """All tasks of a namespace: where each stands."""

    def __init__(self) -> None:
        self._numbers: dict[TaskId, int] = {}
        """Of two tasks with one id the first, which is the one that runs."""
        self._by_offset: dict[int, TaskId] = {}
        self._started: set[int] = set()
        self._ended: set[int] = set()

    async def read(self, log: EventLog) -> None:
        """Reads `tasks`, `episodes` and `results` to their ends."""
        topics = log.topics
        partitions = [
            at for topic in (TASKS, EPISODES, RESULTS) for at in topics.partitions_of(topic)
        ]
        async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
            async for item in deliveries:
                if isinstance(item.event, TaskSubmitted):
                    task = self._by_offset[item.offset] = id_of(item.event)
                    self._numbers.setdefault(task, item.offset)
                elif isinstance(item.event, EpisodeStarted):
                    self._started.add(item.event.task)
                elif isinstance(item.event, TaskEnded):
                    self._ended.add(item.event.task)

    def of_number(self, number: int) -> TaskStatus:
        """The task with a number. UsageError where there is none."""
        task = self._by_offset.get(number)
        if task is None:
            raise UsageError(f"no task has the number {number}; nothing was cancelled")
        return TaskStatus(*task, number, self._state(number))

    def of_id(self, source: str, task_id: str) -> TaskStatus:
        """The task that a source calls so; `unknown` where it has submitted none."""
        number = self._numbers.get((source, task_id))
        state: State = "unknown" if number is None else self._state(number)
        return TaskStatus(source, task_id, number, state)

    def queued(self) -> list[TaskStatus]:
        """All that wait, in the order of their submission."""
        return [
            TaskStatus(*task, number, "queued")
            for number, task in self._by_offset.items()
            if self._state(number) == "queued"
        ]

    def _state(self, number: int) -> State:
        if number in self._ended:
            return "ended"
        return "running" if number in self._started else "queued"


def check_named(tasks: Sequence[str], source: str | None, *, all_queued: bool) -> None:
    """UsageError where it is not said, or said twice, which tasks are meant."""
    if all_queued == bool(tasks) or (all_queued and source is not None):
        raise UsageError("name the tasks to cancel, or else ask for --all-queued alone")
    for task in tasks:
        if source is None and not task.isdecimal():
            raise UsageError(
                f"{task!r} is no task number; with --source NAME tasks go by the ids that their "
                "source gave them"
            )


async def find_tasks(
    log: EventLog, tasks: Sequence[str], source: str | None, *, all_queued: bool
) -> list[TaskStatus]:
    """The tasks that are meant: by their source's ids, or without a source by their numbers.

    UsageError where a number is nobody's.
    """
    statuses = TaskStatuses()
    await statuses.read(log)
    if all_queued:
        return statuses.queued()
    if source is None:
        return [statuses.of_number(int(task)) for task in dict.fromkeys(tasks)]
    return [statuses.of_id(source, task) for task in dict.fromkeys(tasks)]


async def send_cancellations(log: EventLog, statuses: Sequence[TaskStatus], reason: str) -> None:
    """Writes one for each task that has not ended."""
    events = [
        TaskCancelled(source=one.source, task_id=one.task_id, reason=reason)
        for one in statuses
        if one.state != "ended"
    ]
    for first in range(0, len(events), IN_FLIGHT):
        await asyncio.gather(*map(log.send, events[first : first + IN_FLIGHT]))
