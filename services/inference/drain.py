"""How an inference worker leaves without losing or repeating work.

When it is asked to drain, it reports that it is leaving, so agents send it nothing new. Prompts in
its slots are finished. It hands over each prompt that has not started, and each one that still
comes: it sends the same event to a partition of another worker, and is then done with it. If that
is repeated because somebody dies, the first answer counts, as always. Once nothing is open, the
worker leaves its consumer group, and its partitions, which hold nothing that is not done, move.

If no other worker reports, there is nobody to hand over to, and it serves the prompts itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing

from headrace.schemas.events import GenerationRequested, LoadReported, PoolLoad
from headrace.schemas.topics import LOADS
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import Back, follow_events
from headrace.services.worker.load_reports import EVERY_S
from headrace.services.worker.worker_loads import KnownLoad, WorkerLoads

logger = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at whether everything is done."""
LISTEN_S = 1.25 * EVERY_S
"""After this time all other workers have reported, and prompts are handed over. And all agents have
read that this worker is leaving, so they send it nothing more."""
SPREAD = 4
"""Handed-over prompts go to at most so many partitions of a worker."""


class Drain:
    """The drain of one worker."""

    def __init__(self, log: EventLog, worker: str, asked: asyncio.Event) -> None:
        """`worker` is the worker's id. It begins to drain when `asked` is set."""
        self.asked = asked
        self.handed_over = 0
        self._log = log
        self._worker = worker
        self._loads = WorkerLoads(log.topics.policies, log.topics.pool_partitions)
        self._known = asyncio.Event()
        """Set once all other workers have had the time to report."""
        self._sent: Counter[str] = Counter()
        """Prompts that were handed over, by worker."""

    async def run(self, begin: Callable[[], None], open_prompts: Callable[[], int]) -> None:
        """Waits until it is asked to drain, calls `begin`, and returns when the drain is done.

        `open_prompts` returns how many prompts the worker has read and not done.
        """
        await self.asked.wait()
        logger.info("draining: %d prompts are open", open_prompts())
        begin()
        following = asyncio.create_task(self._follow(), name="loads")
        try:
            await asyncio.sleep(LISTEN_S)
            self._known.set()
            while open_prompts():
                if following.done():
                    following.result()
                await asyncio.sleep(LOOK_S)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        logger.info("drained: %d prompts were handed over", self.handed_over)

    def can_hand_over(self, policy: str) -> bool:
        """Whether the worker drains and another one takes prompts of a policy."""
        return self.asked.is_set() and self._best(policy) is not None

    async def hand_over(self, request: GenerationRequested) -> bool:
        """Gives a prompt to another worker. Returns False if this worker must serve it."""
        if not self.asked.is_set():
            return False
        await self._known.wait()
        taker = self._best(request.policy)
        if taker is None:
            return False
        at = taker.partitions[self._sent[taker.worker] % min(SPREAD, len(taker.partitions))]
        self._sent[taker.worker] += 1
        await self._log.send(request, at, awaited=True)
        self.handed_over += 1
        return True

    def _best(self, policy: str) -> KnownLoad[PoolLoad] | None:
        """The worker that has the fewest prompts for its slots. None if there is no other one."""
        at_s = asyncio.get_running_loop().time()
        others = [
            one
            for one in self._loads.of(policy, at_s)
            if one.worker != self._worker and not one.is_suspected(at_s)
        ]
        return min(
            others,
            key=lambda one: (
                (one.load.busy + one.load.waiting + self._sent[one.worker]) / one.load.slots
            ),
            default=None,
        )

    async def _follow(self) -> None:
        at = self._log.topics.partition(LOADS)
        async with aclosing(follow_events(self._log, {at: Back(0)})) as items:
            async for item in items:
                if isinstance(item, Delivery) and isinstance(item.event, LoadReported):
                    self._loads.on_report(item.event, asyncio.get_running_loop().time())
                    self._sent.pop(item.event.worker, None)
