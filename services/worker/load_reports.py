"""Reports a worker's load to the topic `loads`, at a bounded rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from headrace.schemas.events import Event, LoadReported, PoolLoad

EVERY_S = 1.0
"""Seconds between two reports, if nothing else happens."""
SOONEST_S = 0.2
"""Least seconds between two reports."""


class LoadReports:
    """Sends the reports of one worker."""

    def __init__(
        self,
        send: Callable[[Event], Awaitable[object]],
        worker: str,
        measure: Callable[[], Sequence[PoolLoad]],
    ) -> None:
        """`measure` returns the load of each pool as of now."""
        self._send = send
        self._worker = worker
        self._measure = measure
        self._number = 0
        self._news = asyncio.Event()

    def soon(self) -> None:
        """Makes the next report come soon: others should know at once what has changed."""
        self._news.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Reports until cancelled. When `stopping` is set, it reports once more, as leaving."""
        stop = asyncio.create_task(stopping.wait())
        stop.add_done_callback(lambda _: self._news.set())
        try:
            while not stopping.is_set():
                self._news.clear()
                await self._report(leaving=False)
                await asyncio.sleep(SOONEST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S - SOONEST_S):
                        await self._news.wait()
            await self._report(leaving=True)
            await asyncio.Event().wait()
        finally:
            stop.cancel()

    async def _report(self, *, leaving: bool) -> None:
        report = LoadReported(
            worker=self._worker,
            number=self._number,
            every_ms=int(EVERY_S * 1000),
            pools=tuple(self._measure()),
            leaving=leaving,
        )
        self._number += 1
        await self._send(report)
