"""The wall clock. Where the asyncio loop keeps a time of its own (simulation), that is the clock."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds since the epoch: the running loop's `wall_time()` if it has one, else the system's."""
    wall_time = getattr(asyncio.get_running_loop(), "wall_time", None)
    return time.time() if wall_time is None else float(wall_time())


def now_ms() -> int:
    """Milliseconds since the epoch, by the same clock."""
    return int(now() * 1000)
