"""Python imports this at its start, where it's on the path: it lets a test skew `time.time`.

The folder that HEADRACE_CHAOS_CLOCKS names may hold a file `all` and one by this process's id, each
with seconds to add. Both may come and go. `time.monotonic` stays what it is, as on a real machine.
"""

import os
import time

_REREAD_S = 0.1


def _skewed(folder: str) -> None:
    true_time, monotonic = time.time, time.monotonic
    read_at = 0.0
    skew = 0.0

    def seconds(name: str) -> float:
        try:
            with open(os.path.join(folder, name)) as file:
                return float(file.read() or 0)
        except FileNotFoundError:
            return 0.0

    def skewed_time() -> float:
        nonlocal read_at, skew
        now = monotonic()
        if now - read_at > _REREAD_S:
            read_at = now
            skew = seconds("all") + seconds(str(os.getpid()))
        return true_time() + skew

    time.time = skewed_time


if folder := os.environ.get("HEADRACE_CHAOS_CLOCKS"):
    _skewed(folder)
