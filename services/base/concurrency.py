"""Runs coroutines that end together and functions in daemon threads, and waits for descriptors."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

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


def is_failure(error: BaseException, own: asyncio.Task[Any] | None) -> bool:
    """Whether an exception of a user's code means no more than that this code failed.

    `own` is the task that runs the code. It is no failure if the process or this task has to end.
    `sys.exit()` is a failure, and so is a CancelledError if nobody cancelled the task: the code
    awaited a task that was cancelled. A GeneratorExit is one if the task runs: then the code raised
    it itself. Otherwise Python closes the task's coroutine, which nobody needs any more.
    """
    if isinstance(error, KeyboardInterrupt):
        return False
    if isinstance(error, asyncio.CancelledError):
        return own is not None and not own.cancelling()
    return not isinstance(error, GeneratorExit) or (own is not None and own is _running())


def _running() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


async def finish(work: Coroutine[object, object, None], name: str) -> None:
    """Runs `work` to its end. The caller may be cancelled meanwhile, and ends only after that."""
    task, cancelled = asyncio.create_task(work, name=name), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


def use_threads(most: int) -> None:
    """Has `asyncio.to_thread` in this loop use up to `most` threads. Each starts when needed.

    asyncio's own limit is the CPUs + 4, and a call that hangs keeps its thread.
    """
    executor = ThreadPoolExecutor(most, thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(executor)


def in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Runs `work` in a thread of its own. The process does not wait for it when it exits.

    If the future is cancelled before the thread runs, `work` is not done. Later it does nothing.
    """
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # Whoever waits for the result handles it.
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def readable(descriptor: socket.socket | int) -> None:
    """Waits until a descriptor has data or is at its end. A pidfd ends when its process does."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(descriptor)
