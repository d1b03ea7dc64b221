"""Reports a worker's load to the topic `loads`, at a bounded rate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from headrace.schemas.events import EnvironmentLoad, Event, LoadReported, PoolLoad
from headrace.services.worker.limits.shared_limits import SharedLimits

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
        measure: Callable[[], Sequence[PoolLoad | EnvironmentLoad]],
        limits: SharedLimits | None = None,
        waiting: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`measure` returns the load of each policy or environment as of now.

        `limits` are those that the worker shares with others, and `waiting` returns the calls that
        wait for each of them. The reports renew the worker's lease on its shares.
        """
        self._send = send
        self._worker = worker
        self._measure = measure
        self._limits = limits
        self._waiting = waiting
        self._number = 0
        self._news = asyncio.Event()

    def soon(self) -> None:
        """Makes the next report come soon: others should know at once what has changed."""
        self._news.set()

    async def run(self, stopping: asyncio.Event, draining: asyncio.Event | None = None) -> None:
        """Reports until cancelled. When `stopping` is set, it reports once more, as leaving.

        While `draining` is set, it reports as leaving, too: others then see what is left to do.
        """
        stop = asyncio.create_task(stopping.wait())
        stop.add_done_callback(lambda _: self._news.set())
        try:
            while not stopping.is_set():
                self._news.clear()
                await self._report(leaving=draining is not None and draining.is_set())
                await asyncio.sleep(SOONEST_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S - SOONEST_S):
                        await self._news.wait()
            await self._report(leaving=True)
            await asyncio.Event().wait()
        finally:
            stop.cancel()

    async def _report(self, *, leaving: bool) -> None:
        sent_s = asyncio.get_running_loop().time()
        loads = self._measure()
        uses = self._limits.uses(self._waiting()) if self._limits is not None else ()
        lease = self._limits.lease if self._limits is not None else 0
        report = LoadReported(
            worker=self._worker,
            number=self._number,
            every_ms=int(EVERY_S * 1000),
            pools=tuple(one for one in loads if isinstance(one, PoolLoad)),
            leaving=leaving,
            environments=tuple(one for one in loads if isinstance(one, EnvironmentLoad)),
            lease=lease,
            limits=uses,
        )
        self._number += 1
        await self._send(report)
        if self._limits is not None:
            self._limits.on_delivered(lease, sent_s)
