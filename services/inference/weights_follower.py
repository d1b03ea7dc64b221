"""Follows `policies` and loads the newest version of each policy that the worker serves.

Only verified weights are served. If a blob is absent or does not match its publication, this is
logged and tried again, and the worker keeps serving the version before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Mapping
from contextlib import suppress
from pathlib import Path

from headrace.errors import BlobError, DependencyError, InfrastructureError
from headrace.schemas.events import Event, PolicyPublished
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.inference.serving import ServedPolicy
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import CaughtUp
from headrace.services.models.blobs import BlobStore

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0


class WeightsFollower:
    """Keeps engines at the newest published version. It may skip versions in between."""

    def __init__(
        self,
        publications: AsyncIterable[Delivery[Event] | CaughtUp],
        blobs: BlobStore,
        served: Mapping[str, ServedPolicy],
        scratch: Path,
    ) -> None:
        """`publications` yields the events of `policies`, and CaughtUp at the end of the topic.

        Deltas are applied to files in the folder `scratch`, which belongs to this process alone.
        """
        self.ready = asyncio.Event()
        """Set when every policy serves a version that was the newest when its load began."""
        self._publications = publications
        self._served = served
        self._local = {name: LocalWeights(blobs, scratch / name) for name in served}
        self._newest: dict[str, PolicyPublished] = {}
        self._news = {name: asyncio.Event() for name in served}
        self._caught_up = False

    async def run(self) -> None:
        """Follows until cancelled. Raises DependencyError if the log can't be reached."""
        tasks = [asyncio.create_task(self._read(), name="policies")]
        for policy in self._served.values():
            tasks.append(asyncio.create_task(self._keep_newest(policy), name=policy.name))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        async for item in self._publications:
            if not isinstance(item, Delivery):
                self._caught_up = True
                for name in self._newest:
                    self._news[name].set()
            elif isinstance(item.event, PolicyPublished) and item.event.policy in self._served:
                self._on_published(item.event)

    def _on_published(self, published: PolicyPublished) -> None:
        """If the newest version has several records, the last one is valid."""
        known = self._newest.get(published.policy)
        if known is None or published.version >= known.version:
            self._newest[published.policy] = published
            self._served[published.policy].on_published(published.version)
            if self._caught_up:
                self._news[published.policy].set()

    async def _keep_newest(self, policy: ServedPolicy) -> None:
        news = self._news[policy.name]
        retry_s = FIRST_RETRY_S
        while True:
            await news.wait()
            news.clear()
            published = self._newest[policy.name]
            try:
                await self._load(policy, published)
            except (BlobError, DependencyError, InfrastructureError) as error:
                policy.metrics.load_failed.inc()
                logger.error(
                    "policy %s: version %d can't be served, so version %d stays in use. "
                    "Trying again in %.1f s, or with the next version: %s",
                    *(policy.name, published.version, policy.version, retry_s, error),
                )
                with suppress(TimeoutError):
                    async with asyncio.timeout(retry_s):
                        await news.wait()
                news.set()
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            else:
                retry_s = FIRST_RETRY_S

    async def _load(self, policy: ServedPolicy, published: PolicyPublished) -> None:
        weights = await asyncio.to_thread(self._local[policy.name].weights, published)
        await policy.engine.load(weights)
        policy.on_loaded(published.version)
        policy.metrics.loaded.inc()
        policy.metrics.version.set(published.version)
        logger.info("policy %s: serving version %d", policy.name, published.version)
        if all(served.version >= 0 for served in self._served.values()):
            self.ready.set()
