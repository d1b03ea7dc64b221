"""Stops a service's process within a bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

from headrace.services.operate.serve.process_setup import end_garbage_collection

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Seconds between the request to stop and the forced exit."""


class Stopper:
    """Sets `stopping` for every reason to stop, and exits the process if that takes too long.

    SIGUSR1 sets `draining` instead: the service finishes what it has, and then ends by itself. If
    it has not ended after `drain_s` seconds, it is stopped.
    """

    def __init__(
        self, stopping: asyncio.Event, draining: asyncio.Event, drain_s: float | None
    ) -> None:
        """`drain_s` is None if the service does not drain. SIGUSR1 then stops it."""
        self.reason = ""
        """Why it asked the service to stop."""
        self._stopping = stopping
        self._draining = draining
        self._drain_s = drain_s
        self._loop = asyncio.get_running_loop()

    def stop(self, reason: str) -> None:
        """Asks the service to stop. A second Ctrl-C exits the process at once."""
        if self._stopping.is_set():
            if reason == "SIGINT":
                os._exit(130)
            return
        logger.info("stopping: %s", reason)
        end_garbage_collection()
        self.reason = reason
        self._stopping.set()
        # The timer is a thread because the event loop may be what hangs.
        timer = threading.Timer(DRAIN_S, _exit_by_force)
        timer.daemon = True
        timer.start()

    def drain(self, reason: str) -> None:
        """Asks the service to drain, or to stop if it can't. The second SIGTERM stops a drain."""
        if self._drain_s is None:
            self.stop(reason)
        elif not self._draining.is_set():
            logger.info("draining for at most %g s: %s", self._drain_s, reason)
            self._draining.set()
            self._loop.call_later(self._drain_s, self.stop, "the drain took too long")
        elif reason == signal.SIGTERM.name:
            self.stop(reason)

    def stop_on_signals(self, *, drain: bool = False) -> None:
        """Lets SIGTERM and Ctrl-C stop the service, and SIGUSR1 drain it. With `drain`, the first
        SIGTERM drains it, too."""
        usual = self.drain if drain else self.stop
        for number, handler in ((signal.SIGTERM, usual), (signal.SIGINT, self.stop)):
            self._loop.add_signal_handler(number, handler, number.name)
        # Once the loop is closed, its handlers are gone, and SIGUSR1 would kill the process. `run`
        # repeats the signal until the process has ended.
        signal.signal(signal.SIGUSR1, lambda *_: self._soon(self.drain, "SIGUSR1"))

    def stop_with_parent(self, descriptor: int) -> None:
        """Stops the service at the end of the parent's pipe. A thread waits for it."""

        def wait() -> None:
            while os.read(descriptor, 1024):
                pass
            self._soon(self.stop, "the parent process has ended")

        threading.Thread(target=wait, name="parent", daemon=True).start()

    def _soon(self, work: Callable[[str], None], reason: str) -> None:
        with suppress(RuntimeError):  # The loop is closed, so the service has already ended.
            self._loop.call_soon_threadsafe(work, reason)


def _exit_by_force() -> None:
    logger.critical("the service did not stop within %g s: the process exits now", DRAIN_S)
    logging.shutdown()
    os._exit(1)
