"""Reads the turns of the episodes that count as rows, those of the topic `turns`, from the log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from headrace.schemas.events import EpisodeEnded, TaskEnded, TrajectoryRecorded, TurnProjected
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import RESULTS
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.log.unpacked import Texts
from headrace.stream_jobs.groups import GroupAssembler
from headrace.stream_jobs.turn_rows.turn_rows import turn_rows


class RowReader:
    """Reads a run task by task, so that only one task is in memory at once."""

    def __init__(self, log: EventLog, recipe: Recipe) -> None:
        """Raises UsageError if an estimator or a filter of the recipe can't be loaded."""
        self._log = log
        self._assembler = GroupAssembler(recipe)
        self._texts = Texts(recipe)

    async def read(
        self, tasks: Collection[int], most: int
    ) -> AsyncGenerator[list[TurnProjected], None]:
        """Yields the rows of each episode of some tasks, or of all if `tasks` is empty; at most
        `most` episodes. An episode without a turn has no rows.

        Raises RecordsLost if a trajectory was deleted by retention.
        """
        for number in range(self._log.topics.partitions):
            seen: set[int] = set()
            results = self._log.topics.partition(RESULTS, number=number)
            async with aclosing(read_events(self._log, {results: WHOLE})) as deliveries:
                async for delivery in deliveries:
                    ended = delivery.event
                    if not isinstance(ended, TaskEnded) or ended.task in seen:
                        continue
                    seen.add(ended.task)
                    if tasks and ended.task not in tasks:
                        continue
                    recorded_at_ms = round(delivery.recorded_at * 1000)
                    for rows in await self._episodes(ended, recorded_at_ms, most):
                        most -= 1
                        yield rows
                    if not most:
                        return

    async def _episodes(
        self, ended: TaskEnded, recorded_at_ms: int, most: int
    ) -> list[list[TurnProjected]]:
        groups = self._assembler.on_task(ended, recorded_at_ms)
        first: dict[int, EpisodeEnded] = {}
        for outcome in ended.outcomes:
            first.setdefault(outcome.sample, outcome)
        played = [one for one in first.values() if one.trajectory is not None][:most]
        events = await self._log.fetch([one.trajectory for one in played if one.trajectory])
        return [
            list(turn_rows(ended, outcome, event, groups, self._texts))
            for outcome, event in zip(played, events, strict=True)
            if isinstance(event, TrajectoryRecorded)
        ]
