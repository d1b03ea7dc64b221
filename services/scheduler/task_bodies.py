"""The whole tasks: a few in memory, and the others in the log, from which they are read again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from headrace.errors import RecordsLost
from headrace.schemas.events import TaskSubmitted
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import EventLog

KEPT = 1_000
"""At most so many tasks are kept in memory."""
MOST_CHARACTERS = 16_000
"""A task with a longer payload, options and labels is not kept in memory."""
FETCHED_AT_ONCE = 512
"""Tasks that are read together."""


class TaskBodies:
    """Reads tasks by their numbers."""

    def __init__(self, log: EventLog, tasks: Partition) -> None:
        """`tasks` is the partition that holds them."""
        self._log = log
        self._tasks = tasks
        self._kept: dict[int, TaskSubmitted] = {}

    def keep(self, number: int, submitted: TaskSubmitted) -> None:
        """Keeps a task that waits, if there is room: the oldest ones start first."""
        texts = submitted.payload, submitted.options, *submitted.labels.values()
        if len(self._kept) < KEPT and sum(map(len, texts)) <= MOST_CHARACTERS:
            self._kept[number] = submitted

    async def take(self, numbers: Sequence[int]) -> dict[int, TaskSubmitted | None]:
        """Returns tasks by their numbers, and forgets them. None: the log no longer holds it."""
        found: dict[int, TaskSubmitted | None] = {
            number: self._kept.pop(number) for number in numbers if number in self._kept
        }
        rest = iter([number for number in numbers if number not in found])
        while some := list(islice(rest, FETCHED_AT_ONCE)):
            found |= await self._fetch(some)
        return found

    async def _fetch(self, numbers: Sequence[int]) -> dict[int, TaskSubmitted | None]:
        try:
            return await self._read(numbers)
        except RecordsLost:
            # Retention deletes from the beginning. Whatever else is lost ends this process.
            first, _ = (await self._log.broker.ends([self._tasks]))[self._tasks]
            if min(numbers) >= first:
                raise
            kept = [number for number in numbers if number >= first]
            return dict.fromkeys(numbers) | (await self._read(kept) if kept else {})

    async def _read(self, numbers: Sequence[int]) -> dict[int, TaskSubmitted | None]:
        positions = [Position(self._tasks, number) for number in numbers]
        found: dict[int, TaskSubmitted | None] = dict.fromkeys(numbers)
        for record in await self._log.broker.fetch(positions):
            delivery = await self._log.decode_or_dead_letter(record)
            if delivery is not None and isinstance(delivery.event, TaskSubmitted):
                found[record.offset] = delivery.event
        return found


def in_parts(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yields the numbers, at most FETCHED_AT_ONCE at a time."""
    for first in range(0, len(numbers), FETCHED_AT_ONCE):
        yield numbers[first : first + FETCHED_AT_ONCE]
