"""Lets a run go first: the dashboard takes what the processors have left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NICENESS = 10
"""Of the process, and of its session while somebody asks or the log is read for the first time."""
UNASKED = 19
"""Of its session while it only follows the log."""
AFTER_S = 0.3
"""Seconds for which the priority stays after an answer. A page asks for several things at once."""
RETRY_S = 0.1
"""Linux changes the priority of a session at most ten times a second, all users' together."""
AUTOGROUP = Path("/proc/self/autogroup")


class SessionPriority:
    """The priority of this process, and that of its session.

    Linux may weigh sessions against each other, and niceness only within one of them (`autogroup`
    in sched(7)). So this changes the session's priority, too, if this process has begun it, as it
    has under `run --dashboard`. A terminal's session has other programs.
    """

    def __init__(self, caught_up: asyncio.Event) -> None:
        """Lowers the priority. `caught_up` is set when the log was read once to its end."""
        self._caught_up = caught_up
        self._requests = 0
        self._later: asyncio.TimerHandle | None = None
        self._own = os.getsid(0) == os.getpid()
        self._niceness: int | None = None
        with suppress(OSError):
            os.nice(NICENESS)
        self._adapt()

    async def lower_when_read(self) -> None:
        """Waits until the log was read, then lowers the session's priority unless somebody asks."""
        await self._caught_up.wait()
        self._adapt()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Keeps the higher priority while a request is answered. Needs the event loop."""
        self._requests += 1
        self._adapt()
        try:
            yield
        finally:
            self._requests -= 1
            self._again(AFTER_S)

    def _adapt(self) -> None:
        follows_only = not self._requests and self._caught_up.is_set()
        niceness = UNASKED if follows_only else NICENESS
        if not self._own or niceness == self._niceness:
            return
        try:
            AUTOGROUP.write_text(str(niceness))
            self._niceness = niceness
        except BlockingIOError:
            self._again(RETRY_S)
        except OSError:
            self._own = False  # This system does not weigh sessions.

    def _again(self, delay_s: float) -> None:
        """Looks again after `delay_s`, and not earlier."""
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(delay_s, self._adapt)
