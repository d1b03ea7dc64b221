"""The task source: a recipe's data set, epoch by epoch, a bounded number of tasks ahead.

It keeps no state: it reads `tasks` to see what it submitted, and goes on from there. Two at once
do no harm: they submit the same ids, and the scheduler recognises the second.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from headrace.schemas.events import EpisodeStarted, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import EPISODES, TASKS
from headrace.services.base.concurrency import until_first
from headrace.services.base.plugins import load
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
from headrace.services.tasks.data_sets.data_sets import BUILTIN
from headrace.services.tasks.task_maker import Item, TaskMaker
from headrace.services.tasks.warm_start import demonstrating, demonstrations, until_learned
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

SOURCE = "source"
"""Its tasks' `source`."""


async def run(context: ServiceContext) -> None:
    """Submits tasks until there are none left, the run is ending, or it is to stop."""
    stop = until_first(context.stopping.wait(), context.ending.wait())
    await until_first(stop, _submit_all(context))


async def _submit_all(context: ServiceContext) -> None:
    recipe = context.recipe
    source = _Source(context, await submitted_by(context, SOURCE))
    try:
        if (warm := recipe.warm_start) is not None:
            maker = TaskMaker(demonstrating(recipe, warm), SOURCE)
            shown = source.submit(maker, demonstrations(recipe, warm))
            numbers = [number async for number in shown]
            logger.info("%d tasks to demonstrate are submitted", len(numbers))
            await source.wait_for(until_learned(context, numbers))
            logger.info("the demonstrations are learned; now by reward")
        async for _ in source.submit(TaskMaker(recipe, SOURCE), tasks_of(recipe)):
            pass
        logger.info("all tasks are submitted")
    finally:
        await source.aclose()


class _Source:
    """Submits tasks, each once, a bounded number ahead of the scheduler."""

    def __init__(self, context: ServiceContext, submitted: Mapping[str, int]) -> None:
        self._context = context
        self._submitted = submitted
        self._backlog = _Backlog(context, list(submitted.values()))
        self._following = asyncio.create_task(self._backlog.follow())

    async def submit(
        self, maker: TaskMaker, tasks: Iterable[tuple[str, int, Item]]
    ) -> AsyncIterator[int]:
        """Submits what was not submitted before; yields the number of every task."""
        for task_id, epoch, item in tasks:
            number = self._submitted.get(task_id)
            if number is None:
                await self.wait_for(self._backlog.room(self._context.recipe.tasks.backlog))
                number = (await self._context.log.send(maker.make(item, task_id, epoch))).offset
                self._backlog.add(number)
            yield number

    async def wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Waits for it, and raises what ends the following of the backlog meanwhile."""
        waiting = asyncio.create_task(work)
        try:
            await asyncio.wait({waiting, self._following}, return_when=asyncio.FIRST_COMPLETED)
            if self._following.done():
                self._following.result()
            waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def aclose(self) -> None:
        """Follows no more."""
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)


def tasks_of(recipe: Recipe) -> Iterator[tuple[str, int, Item]]:
    """Task id, epoch and item of every task of a recipe, in order."""
    dataset = load("data set", recipe.tasks.use, BUILTIN)
    epochs = itertools.count() if recipe.tasks.epochs is None else range(recipe.tasks.epochs)
    for epoch in epochs:
        position = -1
        for position, item in enumerate(dataset(**recipe.tasks.options)):
            yield f"{epoch}-{position}", epoch, item
        if position < 0:
            return  # an empty data set has no next epoch either


async def submitted_by(context: ServiceContext, source: str) -> dict[str, int]:
    """What a source submitted before: task id to number."""
    tasks = context.log.topics.partition(TASKS)
    numbers: dict[str, int] = {}
    async with aclosing(read_events(context.log, {tasks: WHOLE})) as deliveries:
        async for item in deliveries:
            if isinstance(item.event, TaskSubmitted) and item.event.source == source:
                numbers.setdefault(item.event.task_id, item.offset)
    return numbers


class _Backlog:
    """Which of the source's tasks wait: the scheduler starts them in order."""

    def __init__(self, context: ServiceContext, numbers: list[int]) -> None:
        self._log = context.log
        self._scheduler = context.consumer_group("scheduler")
        self._purpose = context.recipe.tasks.purpose
        self._waiting = deque(sorted(numbers))
        self._moved = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._started = -1
        self._ended_unrun: set[int] = set()
        """Tasks with a verdict, as a cancelled one has: they go before their turn."""

    def add(self, number: int) -> None:
        """Notes a task just submitted."""
        self._waiting.append(number)
        self._drop_started()

    async def follow(self) -> None:
        """Follows `episodes`: a started task waits no more, nor does any before it."""
        topics = self._log.topics
        await self._pass_finished(topics.partition(TASKS))
        places = topics.partitions_of(EPISODES)
        # What was started last, and all that has gone before its turn since: no more than waits.
        back = TAIL + 2 * len(self._waiting)
        # Where other teams' refused tasks are all that lies there, it says nothing.
        if not await self._read(dict.fromkeys(places, Back(back)), enough=len(places)):
            await self._read(dict.fromkeys(places, "first"), enough=0)

    async def _pass_finished(self, tasks: Partition) -> None:
        """What the scheduler has done with was started: the log may not hold its start any more."""
        done = (await self._log.broker.committed(self._scheduler, [tasks])).get(tasks)
        if done is not None:
            self._started = max(self._started, done.offset - 1)

    async def _read(self, starts: Mapping[Partition, Start], enough: int) -> bool:
        """Follows for ever; False where fewer partitions than enough have shown a start by now."""
        shown: set[Partition] = set()
        async with aclosing(follow_events(self._log, starts)) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    if len(shown) < enough:
                        return False
                    self._caught_up.set()
                elif isinstance(item.event, EpisodeStarted):
                    self._on_started(item.event)
                    if self._tells(item.event):
                        shown.add(item.partition)
                self._drop_started()
        return True

    async def room(self, most: int) -> None:
        """Waits until fewer than `most` tasks wait."""
        await self._caught_up.wait()
        while len(self._waiting) >= most:
            self._moved.clear()
            await self._moved.wait()

    def _tells(self, started: EpisodeStarted) -> bool:
        """Whether no task of ours before it waits: its lane is ours, and it was its turn."""
        return started.verdict is None and started.submitted.purpose == self._purpose

    def _on_started(self, started: EpisodeStarted) -> None:
        if self._tells(started):
            self._started = max(self._started, started.task)
        elif started.submitted.source == SOURCE and started.task > self._started:
            self._ended_unrun.add(started.task)

    def _drop_started(self) -> None:
        while self._waiting and self._waiting[0] <= self._started:
            self._ended_unrun.discard(self._waiting.popleft())
        if not self._ended_unrun.isdisjoint(self._waiting):
            unrun = self._ended_unrun.intersection(self._waiting)
            self._waiting = deque(number for number in self._waiting if number not in unrun)
            self._ended_unrun -= unrun
        self._moved.set()
