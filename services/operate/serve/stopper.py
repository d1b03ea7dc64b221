"""Stops a service's process within a bounded time."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from contextlib import suppress

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""Seconds between the request to stop and the forced exit."""


class Stopper:
    """Sets `stopping` for every reason to stop, and exits the process if that takes too long."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()

    def stop(self, reason: str) -> None:
        """Asks the service to stop. A second Ctrl-C exits the process at once."""
        if self._stopping.is_set():
            if reason == "SIGINT":
                os._exit(130)
            return
        logger.info("stopping: %s", reason)
        self._stopping.set()
        # The timer is a thread because the event loop may be what hangs.
        timer = threading.Timer(DRAIN_S, _exit_by_force)
        timer.daemon = True
        timer.start()

    def stop_on_signals(self) -> None:
        """Lets SIGTERM and Ctrl-C stop the service."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop, number.name)

    def stop_with_parent(self, descriptor: int) -> None:
        """Stops the service at the end of the parent's pipe. A thread waits for it."""

        def wait() -> None:
            while os.read(descriptor, 1024):
                pass
            with suppress(RuntimeError):  # The loop is closed, so the service has already ended.
                self._loop.call_soon_threadsafe(self.stop, "the parent process has ended")

        threading.Thread(target=wait, name="parent", daemon=True).start()


def _exit_by_force() -> None:
    logger.critical("the service did not stop within %g s: the process exits now", DRAIN_S)
    logging.shutdown()
    os._exit(1)
