"""How much processor time the reading of a log may take from those who work on the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

SHARE = 0.01
"""The share of a busy machine's processor time that reading may take."""
SPARE = 0.1
"""A machine of which less than this share is idle is busy."""
LOOK_S = 0.25
"""Seconds between two looks at the machine, at least."""
SAVED_S = 0.05
"""Seconds of processor time that a reader may have saved up, and take at once."""
OWED_S = 10.0
"""Seconds of rests that a reader may owe, at most."""
LEAST_S, LONGEST_S = 0.001, 0.25
"""Seconds of a rest. After the longest one, the reader looks at the machine again."""
STAT = Path("/proc/stat")


def idle_seconds() -> float | None:
    """Returns how long this machine's processors have been idle, added up. None: nobody knows."""
    try:
        name, _user, _nice, _system, idle, waiting, *_ = STAT.read_text().split()
        return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK") if name == "cpu" else None
    except (OSError, ValueError):
        return None


class SpareTime:
    """Says how long a reader must rest so that a busy machine hardly notices it.

    While much of the machine is idle, it need not rest. Otherwise it may take SHARE of the
    processors: it pays for what it took with rests. If nobody knows how busy the machine is, it
    counts as busy.
    """

    def __init__(
        self,
        processors: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        taken: Callable[[], float] = time.process_time,
        idle: Callable[[], float | None] = idle_seconds,
    ) -> None:
        """`taken` returns the seconds of processor time of this process, `idle` those in which the
        processors were idle."""
        self._processors = processors or os.cpu_count() or 1
        self._rate = SHARE * self._processors
        self._clock, self._taken, self._idle = clock, taken, idle
        self._saved = SAVED_S
        self._busy = False
        self._at, self._took, self._was_idle = clock(), taken(), idle()
        self._looked_at = self._at

    def rest_s(self) -> float:
        """Returns how many seconds to rest now. Ask again after that."""
        at, took = self._clock(), self._taken()
        self._saved += (at - self._at) * self._rate - (took - self._took)
        # Most of what was taken while the machine was idle, or for a page, is not paid for later.
        self._saved = min(SAVED_S, max(-OWED_S * self._rate, self._saved))
        self._at, self._took = at, took
        if at - self._looked_at >= LOOK_S:
            self._look(at)
        owed_s = -self._saved / self._rate
        return min(LONGEST_S, owed_s) if self._busy and owed_s > LEAST_S else 0.0

    def _look(self, at: float) -> None:
        idle, before = self._idle(), self._was_idle
        passed_s = self._processors * (at - self._looked_at)
        self._busy = idle is None or before is None or idle - before < SPARE * passed_s
        self._was_idle, self._looked_at = idle, at
