from __future__ import annotations

import asyncio
import threading

from headrace.services.base.concurrency import in_daemon_thread


def test_a_result_that_nobody_wants_any_more_is_dropped() -> None:
    """The thread must not fail because the future was cancelled meanwhile."""

    async def main() -> None:
        begun, go_on = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            go_on.wait(10)

        future = in_daemon_thread(work, "unwanted")
        (thread,) = [each for each in threading.enumerate() if each.name == "unwanted"]
        waiting = asyncio.ensure_future(asyncio.wrap_future(future))
        await asyncio.to_thread(begun.wait, 10)
        waiting.cancel()
        await asyncio.wait([waiting])
        go_on.set()
        thread.join(10)
        assert future.done()

    asyncio.run(main())
