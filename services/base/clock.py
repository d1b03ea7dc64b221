"""The wall clock. If the asyncio loop has a wall clock of its own (simulation), it is that one."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds since the epoch, by the running loop's `wall_time()` if it has one."""
    wall_time = getattr(asyncio.get_running_loop(), "wall_time", None)
    return time.time() if wall_time is None else float(wall_time())


def now_ms() -> int:
    """Milliseconds since the epoch, by the same clock."""
    return int(now() * 1000)
