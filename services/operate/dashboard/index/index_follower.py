"""Reads a run's log into an index, and follows it. Joins no consumer group and writes nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import aclosing

from headrace.errors import DecodeError, HeadraceError, RecordsLost
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    ACTIONS,
    BATCHES,
    DEAD_LETTERS,
    EPISODES,
    GENERATIONS,
    GROUPS,
    INSTANCES,
    LOADS,
    OBSERVATIONS,
    OUTCOMES,
    POLICIES,
    PROMPTS,
    RESULTS,
    RUNS,
    TASKS,
    TRAJECTORIES,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Back, CaughtUp, Start, follow_records, resolve_starts
from headrace.services.namespace.apply import lags
from headrace.services.namespace.run_life import RunLife
from headrace.services.operate.dashboard.index.index_rows import Seen, short
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.index.spare_time import SpareTime
from headrace.services.operate.dead_letters.dead_letters import read_dead_letter

logger = logging.getLogger(__name__)

READ = (
    RUNS, TASKS, EPISODES, PROMPTS, GENERATIONS, ACTIONS, OBSERVATIONS, TRAJECTORIES, OUTCOMES,
    RESULTS, GROUPS, BATCHES, POLICIES, INSTANCES, DEAD_LETTERS,
)  # fmt: skip
"""The topics that are read from their beginning."""
PLACED = frozenset({PROMPTS.name, GENERATIONS.name})
"""Of their records only the positions are kept, so they are not decoded."""
RECENT_LOADS = 2_000
"""Offsets of `loads` that are read at first: only the newest report of a worker counts."""
TURN_S = 0.02
"""Seconds of reading, after which requests are served."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
LAG_S = 5.0
"""Seconds between two looks at the lags."""
MOST_LAGS = 600


class IndexFollower:
    """The index of one run, and how far it was read."""

    def __init__(self, log: EventLog, recipe: Recipe, spare: SpareTime | None = None) -> None:
        self.index = RunIndex(recipe)
        self.life = RunLife()
        self.done, self.total = 0, 0
        """Offsets that were read, and those that were there when reading began."""
        self.caught_up = asyncio.Event()
        self.seconds = 0.0
        """How long it took until then."""
        self.problem = ""
        """Why the log can't be read now; empty if it can."""
        self.lags: dict[str, int] | None = None
        self.lags_problem = ""
        self.past_lags: deque[tuple[float, dict[str, int]]] = deque(maxlen=MOST_LAGS)
        self.newest_at = 0.0
        """When the newest record that was read was written."""
        self.resting = False
        """Whether records wait, because the machine is busy."""
        self.undecodable = 0
        """Records that are no events. The run's own services write them to `dead-letters`."""
        self._log = log
        self._recipe = recipe
        self._next: dict[Partition, int] = {}
        """The next offset of each partition."""
        self._ends: dict[Partition, int] = {}
        self._spare = spare or SpareTime()

    async def follow(self) -> None:
        """Follows the log without end. If the broker does not answer, it continues later."""
        delay_s = FIRST_RETRY_S
        while True:
            began = time.monotonic()
            try:
                await self._follow(began)
            except RecordsLost as error:
                logger.warning("the index is made again: %s", error)
                self._begin_again()
            except HeadraceError as error:
                if not self.problem:
                    logger.warning("the log can't be read: %s", error)
                self.problem = str(error)
            delay_s = FIRST_RETRY_S if time.monotonic() - began > 60 else delay_s
            await asyncio.sleep(delay_s)
            delay_s = min(LONGEST_RETRY_S, 2 * delay_s)

    async def follow_lags(self) -> None:
        """Asks for the lags of the services again and again, without end."""
        while True:
            try:
                self.lags = await lags(self._log.broker, self._log.topics)
                self.past_lags.append((now(), self.lags))
                self.lags_problem = ""
            except HeadraceError as error:
                self.lags, self.lags_problem = None, str(error)
            await asyncio.sleep(LAG_S)

    def _begin_again(self) -> None:
        self.index, self.life = RunIndex(self._recipe), RunLife()
        self.done, self._next = 0, {}
        self.caught_up.clear()

    async def _follow(self, began: float) -> None:
        """Reads on from where it was."""
        starts: dict[Partition, Start] = {**await self._starts(), **self._next}
        positions, self._ends = await resolve_starts(self._log, starts)
        self._next = dict(positions)
        if not self.caught_up.is_set():
            self.total = self.done + sum(self._ends[at] - positions[at] for at in positions)
        turn = time.monotonic() + TURN_S
        async with aclosing(follow_records(self._log, starts)) as items:
            async for item in items:
                self.problem = ""
                if isinstance(item, CaughtUp):
                    if not self.caught_up.is_set():
                        self.done, self.seconds = self.total, time.monotonic() - began
                    self.caught_up.set()
                    continue
                await self._take(item)
                if time.monotonic() >= turn:
                    await self._give_way()
                    turn = time.monotonic() + TURN_S

    async def _give_way(self) -> None:
        """Lets requests be served and, once the whole log was read, a busy machine go on."""
        await asyncio.sleep(0)
        while self.caught_up.is_set() and (rest_s := self._spare.rest_s()):
            self.resting = True
            await asyncio.sleep(rest_s)
        self.resting = False

    async def _starts(self) -> dict[Partition, Start]:
        existing = await self._log.broker.list_topics()
        names = {topic.name for topic in READ}
        starts: dict[Partition, Start] = {
            partition: "first"
            for topic in self._log.topics
            if topic.topic.name in names and topic.name in existing
            for partition in topic.all_partitions()
        }
        if self._log.topics.name(LOADS) in existing:
            starts[self._log.topics.partition(LOADS)] = Back(RECENT_LOADS)
        return starts

    async def _take(self, record: Record) -> None:
        at = record.partition
        if not self.caught_up.is_set() and record.offset < self._ends.get(at, 0):
            # Offsets may have gaps, so that the sum of the positions is the progress.
            self.done += record.offset + 1 - self._next[at]
        self._next[at] = record.offset + 1
        self.newest_at = max(self.newest_at, record.timestamp)
        seen = Seen(at, record.offset, record.timestamp, len(record.value or b""))
        topic = self._log.topics.by_name(at.topic).topic
        try:
            if topic.name in PLACED:
                ids = (text for name, text in record.headers if name == "ce_id")
                event_id = next(ids, b"").decode(errors="replace")
                self.index.on_place(seen, record.key, event_id)
                return
            if topic.name == DEAD_LETTERS.name:
                self._on_dead_letter(record)
                return
            event = (await self._log.decode(record)).event
            if topic.name == RUNS.name:
                self.life.on_event(event, record.timestamp)  # type: ignore[arg-type]
            else:
                self.index.on_event(event, seen)
        except (DecodeError, ValueError):
            self.undecodable += 1

    def _on_dead_letter(self, record: Record) -> None:
        found, count = read_dead_letter(record), self.index.dead_letters
        if isinstance(found, int):
            count.on_redriven(found)
        else:
            topic, reason = short(found.topic), short(found.reason)
            count.on_dead_letter(found.number, found.location, topic, reason, found.at)
