"""How often a worker reports its load."""

from __future__ import annotations

import asyncio

from headrace.schemas.events import Event, LoadReported
from headrace.services.worker.load_reports import LoadReports
from tests.simulation.virtual_time import VirtualTimeLoop


def test_reports_come_regularly_soon_after_news_and_once_more_at_the_end() -> None:
    sent: list[tuple[float, LoadReported]] = []
    loop = VirtualTimeLoop(0)
    begun = loop.time()

    async def send(event: Event) -> None:
        assert isinstance(event, LoadReported)
        sent.append((round(loop.time() - begun, 3), event))

    async def main() -> None:
        stopping = asyncio.Event()
        reports = LoadReports(send, "w", lambda: [])
        running = asyncio.create_task(reports.run(stopping))
        await asyncio.sleep(2.3)
        for _ in range(50):  # much news in half a second
            reports.soon()
            await asyncio.sleep(0.01)
        stopping.set()
        await asyncio.sleep(3.0)
        running.cancel()

    loop.run_until_complete(main())
    loop.close()
    assert [at for at, _ in sent] == [0.0, 1.0, 2.0, 2.3, 2.5, 2.7, 2.9]
    assert [event.number for _, event in sent] == list(range(7))
    assert [event.leaving for _, event in sent] == [False] * 6 + [True]
