"""Submits the tasks that the statistics of the items choose.

It follows `groups.<policy>` itself, so it also works while no process keeps the statistics. Those
in `items.<policy>` only save it from reading all groups at its start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from headrace.schemas.events import GroupClosed, TaskSubmitted
from headrace.schemas.topics import GROUPS
from headrace.services.base.concurrency import until_first
from headrace.services.log.log_reader import CaughtUp, follow_events
from headrace.services.tasks.curation.choose_items import Chosen, Curation, Unchosen
from headrace.services.tasks.curation.read_items import first_group, read_items
from headrace.services.tasks.task_maker import TaskMaker
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

QUEUED_GROUPS = 1024
"""Groups that wait for the end of a search."""

Submit = Callable[[TaskSubmitted], Awaitable[int]]
"""Waits for room, sends a task, and returns its number."""


class CuratedSource:
    """Submits one task after the other, as its curation chooses them."""

    def __init__(
        self,
        context: ServiceContext,
        maker: TaskMaker,
        submitted: Mapping[str, int],
        newest: TaskSubmitted | None,
    ) -> None:
        """`submitted` are the tasks of this source: id to number. `newest` is the newest one that
        was chosen by statistics."""
        self._context = context
        self._maker = maker
        self._submitted = submitted
        self._newest = newest
        self._queue: asyncio.Queue[tuple[GroupClosed, int] | None] = asyncio.Queue(QUEUED_GROUPS)
        """Groups with their offsets. None comes after those that were in the log at the start."""

    async def run(self, room: Callable[[], Awaitable[None]], submit: Submit) -> None:
        """Submits tasks until none is left. `room` waits until another task may be submitted."""
        policy = self._context.recipe.curating_policy
        assert policy is not None
        statistics = await read_items(self._context.log, policy)
        curation = Curation(self._context.recipe, statistics, self._submitted)
        if self._newest is not None:
            curation.restore(self._newest)
        newest = min(curation.tasks.newest, statistics.tasks.newest)
        first = await first_group(self._context.log, policy, curation.groups_read, newest)
        logger.info("%d items are known, groups from %d", len(statistics), first)
        await until_first(self._follow(policy, first), self._submit_all(curation, room, submit))

    async def _follow(self, policy: str, first: int) -> None:
        log = self._context.log
        groups = log.topics.partition(GROUPS, policy)
        async with aclosing(follow_events(log, {groups: first})) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    await self._queue.put(None)
                elif isinstance(item.event, GroupClosed):
                    await self._queue.put((item.event, item.offset))

    async def _submit_all(
        self, curation: Curation, room: Callable[[], Awaitable[None]], submit: Submit
    ) -> None:
        open_tasks = deque(sorted(self._submitted.values()))
        # No task is chosen by older statistics than the log has.
        while (queued := await self._queue.get()) is not None:
            curation.on_group(*queued)
        clock = asyncio.get_running_loop().time
        while True:
            await room()
            self._add_groups(curation)
            begun = clock()
            found = await _found(curation)
            took_s = clock() - begun
            while open_tasks and open_tasks[0] in curation.tasks:
                open_tasks.popleft()
            if isinstance(found, Chosen):
                task = await self._maker.make_async(
                    found.item, found.task_id, found.epoch, found.labels
                )
                open_tasks.append(await submit(task))
                curation.accept(found)
                continue
            if found.exhausted or not open_tasks:
                if not found.exhausted:
                    logger.warning(
                        "the curators accept no item of a whole pass, and no task is open that "
                        "could change this: no more tasks are submitted"
                    )
                return
            _add(curation, await self._queue.get())
            await asyncio.sleep(took_s)  # A search may take seconds, and others need time, too.

    def _add_groups(self, curation: Curation) -> None:
        while not self._queue.empty():
            _add(curation, self._queue.get_nowait())


def _add(curation: Curation, queued: tuple[GroupClosed, int] | None) -> None:
    assert queued is not None, "a reader catches up once"
    curation.on_group(*queued)


async def _found(curation: Curation) -> Chosen | Unchosen:
    """Searches, and lets others run in between."""
    for found in curation.search():
        if found is not None:
            return found
        await asyncio.sleep(0)
    raise AssertionError("unreachable: a search ends with what it found")
