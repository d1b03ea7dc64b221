"""Writes the topic `turns`: a row for each turn of each episode that counts.

It reads `results`, fetches the trajectories that they name, and writes their rows. A result is
committed when all its rows are durable. So a crash repeats rows but never loses one, and readers
recognise a repeated row by its id. More processes share the partitions as one consumer group.

The advantages are those of the task's groups, which follow from the result alone: the job computes
them as group assembly does, and does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from prometheus_client import Counter

from headrace.errors import DecodeError, RecordsLost, TooLarge
from headrace.schemas.events import (
    EpisodeEnded,
    GroupClosed,
    TaskEnded,
    TrajectoryRecorded,
    TurnProjected,
)
from headrace.schemas.topics import RESULTS
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import Delivery
from headrace.services.log.unpacked import Texts
from headrace.services.worker.service_context import ServiceContext
from headrace.services.worker.shard import ShardContext
from headrace.services.worker.worker import Worker
from headrace.stream_jobs.groups import GroupAssembler
from headrace.stream_jobs.turn_rows.turn_rows import turn_rows

logger = logging.getLogger(__name__)

SERVICE = "project-turns"
ROWS_AT_ONCE = 16
"""Rows that are being written at the same time."""

ROWS = Counter("headrace_turn_rows_total", "Rows written to `turns`.")
UNREAD = Counter(
    "headrace_turn_rows_unread_total", "Episodes without rows: their trajectory can't be read."
)
LARGE = Counter("headrace_turn_rows_large_total", "Rows that were too large even without labels.")


async def run(context: ServiceContext) -> None:
    """Writes rows until `context.stopping`.

    Raises UsageError if an estimator or a filter of the recipe can't be loaded, and what `Worker`
    raises.
    """
    assembler, texts = GroupAssembler(context.recipe), Texts(context.recipe)
    await Worker(
        context.log,
        topics=[context.log.topics.name(RESULTS)],
        consumer_group=context.consumer_group(SERVICE),
        make_shard=lambda shard: _TurnShard(shard, assembler, texts),
        stopping=context.stopping,
        side_partitions_first=True,  # A shard has no state, so it works from its first record on.
    ).run()


class _TurnShard:
    """Writes the rows of one partition's results. It has no state."""

    def __init__(self, shard: ShardContext, assembler: GroupAssembler, texts: Texts) -> None:
        self._shard = shard
        self._assembler = assembler
        self._texts = texts

    async def on_event(self, delivery: Delivery[TaskEnded]) -> None:
        """Writes the rows of a task. They are durable on return."""
        ended = delivery.event
        groups = self._assembler.on_task(ended, round(delivery.recorded_at * 1000))
        first: dict[int, EpisodeEnded] = {}
        for outcome in ended.outcomes:
            first.setdefault(outcome.sample, outcome)
        for outcome in first.values():
            trajectory = await self._trajectory(outcome)
            if trajectory is not None:
                await self._write(ended, outcome, trajectory, groups)

    async def on_caught_up(self) -> None:
        """Does nothing: there is nothing to know before."""

    async def aclose(self) -> None:
        """Does nothing: rows are durable when a result is done."""

    async def _trajectory(self, outcome: EpisodeEnded) -> TrajectoryRecorded | None:
        """Fetches the trajectory of an episode. What can't be decoded goes to `dead-letters`."""
        ref, log = outcome.trajectory, self._shard.log
        if ref is None:
            return None
        try:
            (event,) = await log.fetch([ref])
        except RecordsLost as error:
            UNREAD.inc()
            logger.warning("task %d sample %d: %s", outcome.task, outcome.sample, error)
            return None
        except DecodeError as error:
            UNREAD.inc()
            position = Position(Partition(ref.topic, ref.partition), ref.offset)
            (record,) = await log.broker.fetch([position])
            await log.dead_letter(record, error.reason)
            return None
        return event if isinstance(event, TrajectoryRecorded) else None

    async def _write(
        self,
        ended: TaskEnded,
        outcome: EpisodeEnded,
        trajectory: TrajectoryRecorded,
        groups: Sequence[GroupClosed],
    ) -> None:
        rows = turn_rows(ended, outcome, trajectory, groups, self._texts)
        while some := await asyncio.to_thread(_next_rows, rows):
            await asyncio.gather(*map(self._send, some))

    async def _send(self, row: TurnProjected) -> None:
        try:
            await self._shard.send(row)
        except TooLarge:
            try:
                await self._shard.send(row.model_copy(update={"labels": {}}))
            except TooLarge as error:
                LARGE.inc()
                logger.warning("a row is left out: %s", error)
                return
        ROWS.inc()


def _next_rows(rows: Iterator[TurnProjected]) -> list[TurnProjected]:
    return [row for _, row in zip(range(ROWS_AT_ONCE), rows, strict=False)]
