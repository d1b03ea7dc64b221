"""The task source: submits a recipe's data set epoch by epoch, a bounded number of tasks ahead.

It keeps no state: it reads `tasks` to see what it has submitted, and goes on from there. If two
task sources run at the same time, they submit the same ids, and the scheduler recognises the
duplicates.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from headrace.schemas.events import EpisodeStarted, TaskSubmitted
from headrace.schemas.topics import EPISODES, TASKS
from headrace.services.base.concurrency import until_first
from headrace.services.kafka.broker import Partition
from headrace.services.log.log_reader import (
    TAIL,
    WHOLE,
    Back,
    CaughtUp,
    Start,
    follow_events,
    read_events,
)
from headrace.services.tasks.artifact_store import store_task_files
from headrace.services.tasks.curation.choose_items import STATE
from headrace.services.tasks.curation.curated_source import CuratedSource, Submit
from headrace.services.tasks.data_sets import items_by_epoch
from headrace.services.tasks.league import LeagueTasks
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.tasks.warm_start import (
    DEMONSTRATED,
    demonstrating,
    demonstrations,
    until_learned,
)
from headrace.services.worker.open_episodes import recorded_waiting
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

SOURCE = "source"
"""The `source` of its tasks."""


async def run(context: ServiceContext) -> None:
    """Submits tasks until all are submitted, the run is ending, or the service must stop."""
    await until_first(context.stopping.wait(), context.ending.wait(), _submit_all(context))


async def _submit_all(context: ServiceContext) -> None:
    league = context.recipe.tasks.league
    pinning = LeagueTasks(context.recipe, league) if league is not None else None
    source = _Source(context, await submitted_by(context, SOURCE), pinning)
    follow = [pinning.follow(context.log)] if pinning is not None else []
    await until_first(source.follow(), *follow, source.submit_all())


@dataclass
class Submitted:
    """The tasks that a source has submitted."""

    numbers: dict[str, int] = field(default_factory=dict)
    """Task id to number."""
    newest: TaskSubmitted | None = None
    """The newest one that was chosen by the statistics of the items."""


async def submitted_by(context: ServiceContext, source: str) -> Submitted:
    """Returns the tasks that a source of the run has submitted.

    If the recipe names keys of its tenant, nobody else can pretend to have submitted them.
    """
    tasks = context.log.topics.partition(TASKS)
    tenant, trusted = context.recipe.tasks.tenant, context.log.topics.trusted
    submitted = Submitted()
    async with aclosing(read_events(context.log, {tasks: WHOLE})) as deliveries:
        async for item in deliveries:
            if isinstance(item.event, TaskSubmitted) and item.event.source == source:
                if trusted.refusal(tenant, item.signed_by(trusted.keys)):
                    continue
                submitted.numbers.setdefault(item.event.task_id, item.offset)
                if STATE in item.event.labels:
                    submitted.newest = item.event
    return submitted


def last_epoch(submitted: Iterable[str]) -> int:
    """Returns the epoch of the last task of the data set with such an id. Those before it are all
    submitted."""
    ids = (one.partition("-") for one in submitted)
    return max((int(epoch) for epoch, _, at in ids if epoch.isdecimal() and at), default=0)


class _Source:
    """Submits each task once, a bounded number of tasks ahead of the scheduler.

    The scheduler starts the tasks in order.
    """

    def __init__(
        self, context: ServiceContext, submitted: Submitted, league: LeagueTasks | None
    ) -> None:
        self._context = context
        self._league = league
        self._log = context.log
        self._store = partial(store_task_files, context.blobs, context.recipe.artifacts)
        self._submitted = submitted.numbers
        self._newest = submitted.newest
        self._waiting = deque(sorted(submitted.numbers.values()))
        """Numbers of the tasks that wait to be started."""
        self._moved = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._started = -1
        """The highest number of a task that has started. All tasks before it have started too."""
        self._refused: set[int] = set()
        """Tasks that started with a verdict, for example cancelled ones: they overtake others."""

    async def submit_all(self) -> None:
        """Submits the tasks of the warm start, waits until they are learned, and submits the
        data set.
        """
        recipe, tasks = self._context.recipe, self._context.recipe.tasks
        if (warm := recipe.warm_start) is not None:
            maker = TaskMaker(demonstrating(recipe, warm), SOURCE, self._store, DEMONSTRATED)
            submitted = self._submit(maker, demonstrations(recipe, warm), self._send)
            numbers = [number async for number in submitted]
            logger.info("submitted %d tasks to demonstrate", len(numbers))
            await until_learned(self._context, numbers)
            logger.info("the policies have learned the demonstrations; now they learn by reward")
        maker = TaskMaker(recipe, SOURCE, self._store)
        if recipe.curating_policy is not None:
            curated = CuratedSource(self._context, maker, self._submitted, self._newest)
            await curated.run(self._room, self._send_with_opponents)
        else:
            begun = last_epoch(self._submitted)
            items = items_by_epoch(tasks.use, tasks.options, tasks.epochs, begun)
            async for _ in self._submit(maker, items, self._send_with_opponents):
                pass
        logger.info("submitted all tasks")

    async def _submit(
        self, maker: TaskMaker, items: Iterable[tuple[str, int, Item]], send: Submit
    ) -> AsyncIterator[int]:
        """Submits each task that was not submitted before, and yields the number of every task."""
        for task_id, epoch, item in items:
            number = self._submitted.get(task_id)
            if number is None:
                await self._room()
                number = await send(await maker.make_async(item, task_id, epoch))
            else:
                await asyncio.sleep(0)  # A successor passes over a million rows, perhaps.
            yield number

    async def _room(self) -> None:
        """Waits until fewer tasks than the backlog wait to be started."""
        await self._caught_up.wait()
        while len(self._waiting) >= self._context.recipe.tasks.backlog:
            self._moved.clear()
            await self._moved.wait()

    async def _send(self, task: TaskSubmitted) -> int:
        """Submits a task and returns its number."""
        number = (await self._log.send(task)).offset
        self._waiting.append(number)
        self._drop_started()
        return number

    async def _send_with_opponents(self, task: TaskSubmitted) -> int:
        """Submits a task of the data set and returns its number."""
        if self._league is not None:
            task = await self._league.with_opponents(task)
        return await self._send(task)

    async def follow(self) -> None:
        """Follows `episodes` without end, and removes the tasks that have started."""
        topics = self._log.topics
        tasks = topics.partition(TASKS)
        scheduler = self._context.consumer_group("scheduler")
        done = (await self._log.broker.committed(scheduler, [tasks])).get(tasks)
        if done is not None:  # retention may have deleted their starts
            record = await recorded_waiting(self._log)
            waiting = set(self._waiting)
            runs = record.runs() if record is not None else ()
            first = next((one for run in runs for one in run if one in waiting), done.offset)
            self._started = min(first, done.offset) - 1
        partitions = topics.partitions_of(EPISODES)
        # This many records contain the last start in order, and all refused tasks after it.
        back = Back(TAIL + 2 * len(self._waiting))
        # They may contain only refused tasks of other teams, which say nothing about ours.
        if not await self._read(dict.fromkeys(partitions, back), enough=len(partitions)):
            await self._read(dict.fromkeys(partitions, "first"), enough=0)

    async def _read(self, starts: Mapping[Partition, Start], enough: int) -> bool:
        """Follows `episodes` without end. Returns False if fewer than `enough` partitions had a
        start in order among the records that exist.
        """
        shown: set[Partition] = set()
        async with aclosing(follow_events(self._log, starts)) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    if len(shown) < enough:
                        return False
                    self._caught_up.set()
                elif isinstance(item.event, EpisodeStarted) and self._on_started(item.event):
                    shown.add(item.partition)
                self._drop_started()
        return True

    def _on_started(self, started: EpisodeStarted) -> bool:
        """Notes a start. Returns whether it is in order: then all of our tasks before it have
        started. The scheduler starts all tasks with our purpose and tenant in order, unless it
        refuses one.
        """
        tasks, submitted = self._context.recipe.tasks, started.submitted
        ours = (submitted.purpose, submitted.tenant) == (tasks.purpose, tasks.tenant)
        in_order = started.verdict is None and ours
        if in_order:
            self._started = max(self._started, started.task)
        elif started.submitted.source == SOURCE and started.task > self._started:
            self._refused.add(started.task)
        return in_order

    def _drop_started(self) -> None:
        while self._waiting and self._waiting[0] <= self._started:
            self._refused.discard(self._waiting.popleft())
        refused = self._refused.intersection(self._waiting)
        if refused:
            self._waiting = deque(number for number in self._waiting if number not in refused)
            self._refused -= refused
        self._moved.set()
