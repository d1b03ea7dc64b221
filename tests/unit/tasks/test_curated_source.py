"""The task source around its curation: it follows groups, waits if a task is open, and ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.events import TaskSubmitted
from headrace.schemas.topics import GROUPS
from headrace.services.tasks.curation.choose_items import Curation
from headrace.services.tasks.curation.curated_source import CuratedSource
from headrace.services.tasks.task_maker import TaskMaker
from headrace.services.worker.service_context import ServiceContext
from tests.memory.memory_broker import MemoryBroker
from tests.unit.stream_jobs.test_assemble_batches import BOUND_S, a_context, make_topics
from tests.unit.tasks.test_curation import curated
from tests.unit.tasks.test_item_statistics import a_closed_group


class Played:
    """A source with room for four open tasks, whose groups the test closes."""

    def __init__(self, *curators: Any, **tasks: Any) -> None:
        self.recipe = curated(*curators, **tasks)
        self.broker = MemoryBroker()
        self.context: ServiceContext = a_context(self.broker, "space", self.recipe, Path())
        self.tasks: list[TaskSubmitted] = []
        self._closed = 0
        self._moved = asyncio.Event()

    def start(self) -> asyncio.Task[None]:
        """Starts the source, again with all that it submitted."""
        numbers = {task.task_id: number for number, task in enumerate(self.tasks)}
        newest = self.tasks[-1] if self.tasks else None
        source = CuratedSource(self.context, TaskMaker(self.recipe, "source"), numbers, newest)
        return asyncio.ensure_future(source.run(self._room, self._submit))

    async def close(self, number: int, *rewards: float) -> None:
        """Closes the group of a task, which has its reward then."""
        task = self.tasks[number]
        group = a_closed_group(number, task.item_id, *rewards, epoch=task.epoch)
        await self.context.log.send(group)
        self._closed += 1
        self._moved.set()

    async def submitted(self, count: int) -> list[str]:
        """Waits for so many tasks, and returns their ids."""
        async with asyncio.timeout(BOUND_S):
            while len(self.tasks) < count:
                await asyncio.sleep(0.01)
        return [task.task_id for task in self.tasks]

    async def _room(self) -> None:
        while len(self.tasks) - self._closed >= 4:
            self._moved.clear()
            await self._moved.wait()

    async def _submit(self, task: TaskSubmitted) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


async def stop(source: asyncio.Task[None]) -> None:
    """As if its process had ended."""
    source.cancel()
    await asyncio.gather(source, return_exceptions=True)


def test_it_waits_while_a_task_is_open_and_ends_when_nothing_can_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    searches = 0
    search = Curation.search

    def counted(self: Curation) -> Any:
        nonlocal searches
        searches += 1
        return search(self)

    monkeypatch.setattr(Curation, "search", counted)

    async def main() -> None:
        played = Played({"use": "pass_rate", "episodes": 1})
        await make_topics(played.context.log)
        source = played.start()
        assert await played.submitted(4) == ["0-0", "0-1", "0-2", "0-3"]
        # Room for one more, and what is known of item 0 may have come or not.
        await played.close(0, 1.0, 1.0)
        first = await played.submitted(5)
        for number in range(1, 4):
            await played.close(number, 1.0, 1.0)
        await asyncio.sleep(0.3)
        before, submitted = searches, len(played.tasks)
        await asyncio.sleep(0.3)
        assert searches == before, "it waits, and does not look again and again"
        assert not source.done()
        for number in range(4, submitted):
            await played.close(number, 1.0, 1.0)
        await asyncio.wait_for(source, BOUND_S)
        assert first[4] in ("1-0", "1-1")
        assert "no more tasks are submitted" in caplog.text
        await played.broker.close()

    asyncio.run(main())


def test_a_group_that_changes_the_statistics_goes_on_and_so_does_a_restart() -> None:
    async def main() -> None:
        played = Played({"use": "pass_rate", "episodes": 1}, options={"items": 3})
        await make_topics(played.context.log)
        source = played.start()
        await played.submitted(4)  # one of them in the second epoch, before anything is known
        await stop(source)
        for number in range(3):
            await played.close(number, 1.0, 1.0)
        source = played.start()
        await asyncio.sleep(0.2)
        assert len(played.tasks) == 4, "all groups of the log were read before the first choice"
        await played.close(3, 0.0, 0.0)
        found = await played.submitted(8)
        assert found[4:] == ["2-0", "3-0", "4-0", "5-0"], "item 0 has passed and failed"
        await stop(source)
        await played.broker.close()

    asyncio.run(main())


def test_groups_that_retention_deleted_do_not_end_the_source() -> None:
    """Such as those of a run that was paused for months, without statistics of its items."""

    async def main() -> None:
        played = Played({"use": "pass_rate", "episodes": 1}, options={"items": 3})
        log = played.context.log
        await make_topics(log)
        source = played.start()
        await played.submitted(4)
        await stop(source)
        for number in range(4):
            await played.close(number, 1.0, 1.0)
        played.broker._state.log(log.topics.partition(GROUPS, "default")).expire(2)
        source = played.start()
        found = await played.submitted(8)
        assert found[4:] == ["1-1", "2-1", "3-1", "4-1"], "that item 1 has passed is lost"
        await stop(source)
        await played.broker.close()

    asyncio.run(main())
