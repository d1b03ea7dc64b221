"""Serves prompts that are pinned to a version, while another engine serves the newest version.

A second engine holds one pinned version at a time. It changes versions only between two prompts, so
all tokens of a pinned prompt come from its version. Prompts are taken in the order of arrival: a
prompt for another version waits until the prompts in flight are done, so no prompt waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace.errors import BlobError, DependencyError, InfrastructureError
from headrace.schemas.events import GenerationRequested, PolicyPublished
from headrace.services.base import clock
from headrace.services.inference.engine import Weights
from headrace.services.inference.serving import ServedPolicy, Slot

FindPublication = Callable[[str, int], Awaitable[PolicyPublished | None]]
"""Returns the valid publication of a policy's version, None if there is no such publication."""


class PinnedVersions:
    """The pinned versions of one policy. The engine is made for the first pinned prompt."""

    def __init__(
        self,
        name: str,
        make: Callable[[], ServedPolicy],
        find: FindPublication,
        fetch: Callable[[PolicyPublished], Weights],
    ) -> None:
        """`make` makes the engine, and `fetch` fetches verified weights. Both may block."""
        self._name = name
        self._make = make
        self._find = find
        self._fetch = fetch
        self._served: ServedPolicy | None = None
        self._taking = asyncio.Lock()
        self._changing: asyncio.Task[None] | None = None
        self._changing_to = -1
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def take(self, request: GenerationRequested) -> AsyncIterator[tuple[ServedPolicy, Slot]]:
        """Waits for the request's version and a free slot, and holds both.

        Raises InfrastructureError if the version can't be served, or if the request expires first.
        """
        served, slot = await self._take(request)
        try:
            yield served, slot
        finally:
            slot.free()
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def _take(self, request: GenerationRequested) -> tuple[ServedPolicy, Slot]:
        assert request.pinned is not None
        try:
            async with asyncio.timeout(max(0.0, request.expires_at / 1000 - clock.now())):
                async with self._taking:
                    served = await self._serve(request.pinned)
                    slot = await served.slots.take()
                    self._in_flight += 1
                    self._idle.clear()
                    return served, slot
        except TimeoutError:
            reason = f"version {request.pinned} could not be served before the request expired"
            raise InfrastructureError("expired", reason, retryable=False) from None

    async def close(self) -> None:
        """Closes the engine, if there is one."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait({self._changing})
        if self._served is not None:
            await self._served.engine.close(drain_s=0)

    async def _serve(self, version: int) -> ServedPolicy:
        while self._served is None or self._served.version != version:
            if self._changing is None:
                await self._idle.wait()
                self._changing = asyncio.create_task(self._change(version), name="pin")
                self._changing_to = version
            # If this prompt is cancelled here, the change goes on and the next prompt awaits it.
            changing = self._changing
            await asyncio.wait({changing})
            self._changing = None
            error = changing.exception()
            if error is not None and self._changing_to == version:
                raise error
        return self._served

    async def _change(self, version: int) -> None:
        try:
            published = await self._find(self._name, version)
            if published is None:
                unknown = f"version {version} of policy {self._name!r} was never published"
                raise InfrastructureError("version_unavailable", unknown, retryable=False)
            weights = await asyncio.to_thread(self._fetch, published)
            if self._served is None:
                self._served = await asyncio.to_thread(self._make)
            self._served.version = -1
            await self._served.engine.load(weights)
        except (BlobError, DependencyError) as error:
            message = f"version {version} of policy {self._name!r} can't be served: {error}"
            raise InfrastructureError("version_unavailable", message) from error
        self._served.version = version
        self._served.slots.notify()
