"""A bounded pool of daemon threads, for blocking calls."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Runs blocking functions in threads for one event loop.

    Python waits for the threads of `concurrent.futures` before it exits. These threads are daemons,
    so that a call which hangs doesn't keep the process from ending.
    """

    def __init__(self, size: int, name: str) -> None:
        """At most `size` threads, which are started when they are needed."""
        self._size = size
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._idle = threading.Semaphore(0)
        self._started = 0

    async def run(self, function: Callable[[], T]) -> T:
        """The function's result, or its exception.

        If the caller is cancelled, a function that waits for a thread is not run at all. One that
        runs already goes on to its end, and its result is lost.
        """
        future: Future[T] = Future()
        self._work.put((future, function))
        if not self._idle.acquire(blocking=False) and self._started < self._size:
            self._started += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends each thread after what it does now. Call `run` no more."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            _settle(*work)
            del work  # an idle thread holds on to no result
            self._idle.release()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
