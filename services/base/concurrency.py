"""Runs coroutines that end together, and functions in threads that nothing waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def until_first(*work: Coroutine[object, object, object]) -> None:
    """Runs all of `work` until one ends, cancels the others, and raises its error if it failed."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Runs `work` in a thread of its own. The process does not wait for it when it exits."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
