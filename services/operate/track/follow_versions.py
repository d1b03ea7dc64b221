"""Follows the versions of a run, and passes each one to a tracker once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from headrace.schemas.events import Event, PolicyPublished, RunStateEntered
from headrace.schemas.topics import POLICIES, RUNS
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, CaughtUp, follow_events, read_events
from headrace.services.operate.track.tracker import Tracker, point_of

MakeTracker = Callable[[str, str], Tracker]
"""Makes the tracker of a namespace and a policy. Blocks."""


class VersionFeed:
    """Passes publications to trackers. A version that the output has is not written again."""

    def __init__(self, namespace: str, make: MakeTracker) -> None:
        self._namespace = namespace
        self._make = make
        self._trackers: dict[str, Tracker] = {}
        self.written = 0

    async def on_published(self, published: PolicyPublished, recorded_at: float) -> None:
        """Writes a version if it is newer than the output.

        Of a version that was published again after a restart, the first record counts: it has the
        metrics of the training.
        """
        tracker = self._trackers.get(published.policy)
        if tracker is None:
            tracker = await asyncio.to_thread(self._make, self._namespace, published.policy)
            self._trackers[published.policy] = tracker
        if published.version > tracker.last:
            await tracker.write(point_of(published, recorded_at))
            self.written += 1

    async def finish(self) -> None:
        """Writes what trackers kept back. The run has ended."""
        for tracker in self._trackers.values():
            await tracker.finish()

    async def aclose(self) -> None:
        """Closes all trackers."""
        for tracker in self._trackers.values():
            await tracker.aclose()


async def follow_versions(log: EventLog, make: MakeTracker) -> int:
    """Passes all versions to trackers until the run has ended. Returns how many were written."""
    feed = VersionFeed(log.topics.namespace, make)
    policies, runs = log.topics.partition(POLICIES), log.topics.partition(RUNS)
    caught_up = ended = False
    try:
        async with aclosing(follow_events(log, {policies: "first", runs: "first"})) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    caught_up = True
                elif isinstance(item.event, RunStateEntered):
                    ended = ended or item.event.state == "ended"
                else:
                    await _pass_on(feed, item)
                if caught_up and ended:
                    break
        # The end of the run and the last versions are in two topics, so some may not be read yet.
        async with aclosing(read_events(log, {policies: WHOLE})) as deliveries:
            async for delivery in deliveries:
                await _pass_on(feed, delivery)
        await feed.finish()
    finally:
        await feed.aclose()
    return feed.written


async def _pass_on(feed: VersionFeed, delivery: Delivery[Event]) -> None:
    if isinstance(delivery.event, PolicyPublished):
        await feed.on_published(delivery.event, delivery.recorded_at)
