"""What a plug-in does to its process: how long it blocks the loop, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.services.operate.conformance.conformance_report import Violation, require
from headrace.services.processes.guard import children

TICK_S = 0.005
GONE_S = 2.0
"""Seconds that processes and tasks may take to end after the plug-in was closed."""
TRIES = 3
"""Another program may hold up this one, so only what always takes too long counts."""


@dataclass
class Blocking:
    """The longest time for which nothing else ran in the asyncio loop, in seconds."""

    seconds: float = 0.0


@contextmanager
def blocking() -> Iterator[Blocking]:
    """Measures how long the loop is blocked until the end of the `with`."""
    found, loop = Blocking(), asyncio.get_running_loop()
    seen_at = loop.time()

    def see() -> None:
        nonlocal seen_at
        now = loop.time()
        found.seconds = max(found.seconds, now - seen_at - TICK_S)
        seen_at = now

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            see()

    ticking = asyncio.create_task(tick())
    try:
        yield found
    finally:
        see()
        ticking.cancel()


async def require_in_time(
    measure: Callable[[], Awaitable[float]], limit_s: float, what: str
) -> None:
    """Raises Violation if `measure` returns more than `limit_s` seconds each time it is tried."""
    least = float("inf")
    for _ in range(TRIES):
        least = min(least, await measure())
        if least <= limit_s:
            return
    raise Violation(f"{what} {least:.2f} s; {limit_s:g} s are allowed")


async def require_free_loop(work: Callable[[], Awaitable[object]], limit_s: float) -> None:
    """Raises Violation if work blocks the loop for longer than `limit_s` each time it is tried."""

    async def measure() -> float:
        with blocking() as found:
            await work()
        return found.seconds

    await require_in_time(measure, limit_s, "a call blocked the asyncio loop for")


class Leftovers:
    """The child processes and the asyncio tasks that are new since this was made.

    Only Linux lists the processes.
    """

    def __init__(self) -> None:
        self._processes = set(children())
        self._tasks = asyncio.all_tasks()

    async def require_none(self, after: str) -> None:
        """Waits a moment for their end. Raises Violation if some are left `after` something."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + GONE_S
        while (left := self._left()) and loop.time() < ends_at:
            await asyncio.sleep(TICK_S)
        require(not left, f"{after} these were left: {'; '.join(left[:3])}")

    def _left(self) -> list[str]:
        tasks = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        named = [f"the asyncio task {one.get_coro()!r:.100}" for one in tasks]
        for pid in set(children()) - self._processes:
            with suppress(OSError):  # It has ended meanwhile.
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # A process that has ended has none.
                    named.append(f"the process {pid} ({command.strip():.100})")
        return named
