"""Keeps a task that an agent's code creates from ending the process by `sys.exit()`.

asyncio lets SystemExit and KeyboardInterrupt of any task out of the event loop, and so ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

from headrace.services.agent.awaiting import forgotten
from headrace.services.agent.memory.lone_agent import play
from headrace.services.agent.stops import contained


def contain_exits() -> None:
    """Turns exits in tasks that agents create in this loop into errors, from now on."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if not isinstance(before, _Containing):
        loop.set_task_factory(_Containing(before))


class _Containing:
    """A task factory."""

    def __init__(self, before: Any) -> None:
        self._make = before or _make

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Future[Any]:
        # `play` contains the exits of the agent itself, in less memory.
        if forgotten.get(None) is not None and getattr(work, "cr_code", None) is not play.__code__:
            work = _Contained(work)
        made: asyncio.Future[Any] = self._make(loop, work, **options)
        return made


def _make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(work, loop=loop, **options)


class _Contained(Coroutine[Any, Any, Any]):
    """A coroutine that raises a RuntimeError instead of an exit."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any, /) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as exit:
            raise contained(exit) from exit

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exit:
            raise contained(exit) from exit

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()
