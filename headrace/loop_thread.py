"""An event loop in a thread, so that scripts and notebooks can wait for coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from contextlib import ExitStack
from typing import Self, TypeVar

from headrace.errors import UsageError

T = TypeVar("T")

CLOSE_S = 10.0
"""Seconds that the loop's thread may take to end."""


class LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self) -> None:
        """Starts the thread."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="headrace", daemon=True)
        self._thread.start()

    def wait(self, work: Awaitable[T]) -> T:
        """Returns the result of a coroutine. Raises UsageError after `close`."""
        if self.loop.is_closed():
            if isinstance(work, Coroutine):
                work.close()
            raise UsageError("the client is closed: make a new one")

        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result()
        finally:
            future.cancel()  # It does nothing unless Ctrl-C ended the wait: then the work ends too.

    def close(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self.loop.close()


class ClosedAtExit:
    """A client that a `with` statement closes."""

    _closing: ExitStack
    """What closes the connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. A second call does nothing."""
        self._closing.close()
