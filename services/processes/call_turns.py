"""Limits how many calls of an engine run at the same time."""

from __future__ import annotations

import asyncio
import math


class CallTurns:
    """The turns of an engine's calls.

    Whoever waits for one waits as long as the engine answers others: a long queue of ours is not
    an engine that is silent.
    """

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._answered_at = -math.inf

    async def take(self, limit_s: float) -> None:
        """Waits for a turn. Raises TimeoutError if the engine answers nobody for `limit_s`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        waiting = asyncio.ensure_future(self._free.acquire())
        try:
            while not waiting.done():
                left_s = max(began, self._answered_at) + limit_s - loop.time()
                if left_s <= 0:
                    raise TimeoutError
                await asyncio.wait({waiting}, timeout=left_s)
        except BaseException:
            if not waiting.cancel():  # it has got its turn
                self._free.release()
            raise

    def end(self, *, answered: bool) -> None:
        """Ends a turn. `answered` says whether the engine answered, even if it refused."""
        if answered:
            self._answered_at = asyncio.get_running_loop().time()
        self._free.release()
