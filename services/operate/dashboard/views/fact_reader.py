"""Reads the records of a task by the positions in the index."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from headrace.errors import DecodeError, RecordsLost, UsageError
from headrace.schemas.events import Event
from headrace.schemas.topics import Topic
from headrace.services.kafka.broker import Position, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.operate.dashboard.index.index_rows import TaskRow
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.show.facts import Fact, fact_of

MAX_BYTES = 48 << 20
"""Most bytes of records for one page. The index knows their sizes. The rest is left out, with a
remark."""
TURN_BYTES = 256 << 10
"""Bytes of records that are decoded before other requests have a turn."""
LEAST_BYTES = TURN_BYTES // 100
"""A smaller record counts as so many bytes, because decoding it takes time, too."""
MAX_RECORDS = 5_000
"""Most records for one page."""


class FactReader:
    """Reads single records of one namespace. Leaves no trace there."""

    def __init__(self, log: EventLog) -> None:
        self.log = log

    async def of_task(
        self,
        index: RunIndex,
        task: int,
        sample: int | None = None,
        topics: Collection[Topic[Any]] | None = None,
    ) -> tuple[list[Fact[Event]], list[str]]:
        """Returns the facts of a task, or of one of its samples, and remarks on what is left out.

        With `topics`, it reads only those. Raises UsageError if the index has no such task.
        """
        row = task_row(index, task)
        names = None if topics is None else {topic.name for topic in topics}
        wanted: list[tuple[Position, int]] = []
        remarks: list[str] = []
        total = left_out = 0
        for packed, size in sorted(row.positions_of(sample)):
            position = index.positions.unpack(packed)
            if names is not None and self._topic(position) not in names:
                continue
            if len(wanted) < MAX_RECORDS and total + size <= MAX_BYTES:
                wanted.append((position, size))
                total += size
            else:
                left_out += 1
        if left_out:
            remarks.append(
                f"{left_out:,} records are left out: a page has at most {MAX_RECORDS:,} records "
                f"and {MAX_BYTES >> 20} MiB"
            )
        facts: list[Fact[Event]] = []
        decoded = 0
        for record in await self.fetch([at for at, _ in wanted], remarks):
            if decoded >= TURN_BYTES:
                decoded = 0
                await asyncio.sleep(0)
            decoded += max(len(record.value or b""), LEAST_BYTES)
            try:
                facts.append(await fact_of(self.log, record))
            except DecodeError as error:
                remarks.append(f"a record does not decode: {error.reason}")
        return facts, remarks

    async def fetch(self, positions: Sequence[Position], remarks: list[str]) -> list[Record]:
        """Returns the records that are still there, with a remark on how many are gone."""
        try:
            return await self.log.broker.fetch(positions)
        except RecordsLost:
            bounds = await self.log.broker.ends(list({one.partition for one in positions}))
        kept = [one for one in positions if bounds[one.partition][0] <= one.offset]
        remarks.append(f"retention removed {len(positions) - len(kept):,} records of this page")
        return await self.log.broker.fetch(kept)

    async def one(self, position: Position) -> Fact[Event] | None:
        """Returns one fact, or None if it is gone or does not decode."""
        for record in await self.fetch([position], []):
            with suppress(DecodeError):
                return await fact_of(self.log, record)
        return None

    async def delivery(self, position: Position) -> Delivery[Event] | None:
        """Returns one event with its signature, or None if it is gone or does not decode."""
        for record in await self.fetch([position], []):
            with suppress(DecodeError):
                return await self.log.decode(record)
        return None

    def _topic(self, position: Position) -> str:
        try:
            return self.log.topics.by_name(position.partition.topic).topic.name
        except KeyError:
            return ""


def task_row(index: RunIndex, task: int) -> TaskRow:
    """Returns the row of a task. Raises UsageError if the index has none."""
    row = index.tasks.get(task)
    if row is None:
        raise UsageError(
            f"the dashboard has not read a record of task {task}: it does not exist, was not read "
            f"yet, or is too old. `headrace show {task}` searches the log"
        )
    return row
