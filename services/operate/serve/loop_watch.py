"""Says which code of a user blocks the event loop, on which all episodes of a worker wait."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from types import FrameType

logger = logging.getLogger(__name__)

LIMIT_S = 2.0
"""A call that blocks the loop for longer is logged."""
SAMPLE_S = 0.5
"""Seconds between two looks at what the loop does."""


class LoopWatch:
    """Watches the running event loop from a thread, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beaten = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._beaten.clear()
            try:
                self._loop.call_soon_threadsafe(self._beaten.set)
            except RuntimeError:  # the loop is closed
                return
            began, last, warned = time.monotonic(), self._blame(), False
            while not self._beaten.wait(SAMPLE_S) and not self._closed.is_set():
                blamed = self._blame()
                if blamed != last:
                    began, last = time.monotonic(), blamed
                seconds = time.monotonic() - began
                if blamed is None or seconds < LIMIT_S or warned:
                    continue
                warned = True
                logger.warning(
                    "%s has blocked the event loop for %.1f s. All episodes of this worker wait "
                    "for it: await what it waits for, or call it by asyncio.to_thread",
                    blamed,
                    seconds,
                )
            self._closed.wait(SAMPLE_S)

    def _blame(self) -> str | None:
        """Returns the outermost function on the loop's stack that is neither ours nor Python's."""
        frame = sys._current_frames().get(self._loop_thread)
        found: FrameType | None = None
        while frame is not None and frame.f_code.co_name != "_run_once":  # asyncio's loop
            if not _known(frame):
                found = frame
            frame = frame.f_back
        if found is None:
            return None
        code = found.f_code
        return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _known(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("headrace", "__main__") or package in sys.stdlib_module_names
