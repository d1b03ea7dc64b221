"""An exit in a task that an agent's code creates fails the attempt, and ends no event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.schemas.events import EpisodeEnded
from headrace.services.agent.crash_isolation.contained_tasks import contain_exits
from headrace.services.agent.episode import Episode
from tests.unit.agent.test_shard import Bench, started


async def leave() -> None:
    sys.exit(0)


async def leave_later() -> None:
    await asyncio.sleep(0)
    raise KeyboardInterrupt


async def in_a_task(episode: Episode) -> None:
    await asyncio.create_task(leave())


async def in_a_group(episode: Episode) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(leave_later())


async def unnoticed(episode: Episode) -> None:
    task = asyncio.create_task(leave())
    await asyncio.wait({task})
    assert isinstance(task.exception(), RuntimeError)


async def cancelled_at_once(episode: Episode) -> None:
    task = asyncio.create_task(leave())
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.parametrize(
    ("agent", "ending", "message"),
    [
        (in_a_task, "failed", "the agent's code raised SystemExit: 0"),
        (in_a_group, "failed", "TaskGroup"),
        (unnoticed, "finished", ""),
        (cancelled_at_once, "finished", ""),
    ],
)
def test_an_exit_in_a_task_of_an_agent_is_an_error(
    agent: Callable[[Episode], Coroutine[Any, Any, None]], ending: str, message: str
) -> None:
    async def main() -> EpisodeEnded:
        contain_exits()
        contain_exits()  # again, as by another worker in this loop
        bench = Bench()
        setup = bench.shard.agents["default"]
        bench.shard.agents = {"default": type(setup)(agent, {}, setup.settings, {})}
        try:
            await bench.catch_up()
            await bench.feed(started(1))
            async with asyncio.timeout(5):
                while not any(isinstance(one, EpisodeEnded) for one in bench.sent):
                    await asyncio.sleep(0.01)
        finally:
            await bench.end()
        return next(one for one in bench.sent if isinstance(one, EpisodeEnded))

    ended = asyncio.run(main())
    assert ended.ending == ending
    assert (ended.failure is not None) == bool(message)
    if ended.failure is not None:
        assert message in ended.failure.message
