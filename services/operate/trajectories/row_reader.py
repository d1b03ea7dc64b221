"""Reads the turns of the episodes that count as rows, those of the topic `turns`, from the log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from headrace.schemas.events import EpisodeEnded, TaskEnded, TrajectoryRecorded, TurnProjected
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.event_log import EventLog
from headrace.services.log.kept_records import KeptRecords
from headrace.services.log.unpacked import Texts
from headrace.services.operate.trajectories.recorded_episodes import (
    counted_results,
    require_episodes,
)
from headrace.stream_jobs.groups import GroupAssembler
from headrace.stream_jobs.turn_rows.turn_rows import turn_rows


class RowReader:
    """Reads a run task by task, so that only a few episodes are in memory at once."""

    def __init__(self, log: EventLog, recipe: Recipe) -> None:
        """Raises UsageError if an estimator or a filter of the recipe can't be loaded."""
        self.unread = 0
        """Episodes that were left out, because their trajectory is gone or can't be decoded."""
        self._log = log
        self._kept = KeptRecords(log.broker)
        self._assembler = GroupAssembler(recipe)
        self._texts = Texts(recipe)

    async def read(
        self, tasks: Collection[int], most: int
    ) -> AsyncGenerator[list[TurnProjected], None]:
        """Yields the rows of each episode of some tasks, or of all if `tasks` is empty; at most
        `most` episodes. An episode without a turn has no rows.

        Leaves out episodes whose trajectory can't be read any more. Raises RecordsLost if that
        leaves none.
        """
        left = most
        for number in range(self._log.topics.partitions):
            async with aclosing(counted_results(self._log, number, tasks)) as results:
                async for ended, recorded_at in results:
                    async with aclosing(self._episodes(ended, recorded_at)) as episodes:
                        async for rows in episodes:
                            left -= 1
                            yield rows
                            if not left:
                                return
        require_episodes(most - left, self.unread)

    async def _episodes(
        self, ended: TaskEnded, recorded_at: float
    ) -> AsyncGenerator[list[TurnProjected], None]:
        groups = self._assembler.on_task(ended, round(recorded_at * 1000))
        first: dict[int, EpisodeEnded] = {}
        for outcome in ended.outcomes:
            first.setdefault(outcome.sample, outcome)
        played = {one.trajectory: one for one in first.values() if one.trajectory is not None}
        kept = await self._kept.kept(list(played))
        self.unread += len(played) - len(kept)
        async with aclosing(self._log.fetch_each(kept)) as events:
            for ref in kept:
                event = await anext(events)
                if isinstance(event, TrajectoryRecorded):
                    yield list(turn_rows(ended, played[ref], event, groups, self._texts))
                else:
                    self.unread += 1
