"""Serves the versions that prompts are pinned to, beside the newest, which goes on as it is.

A second engine holds one such version at a time. It changes only between two prompts, so every
token of a pinned prompt is of its version. Prompts are taken in the order in which they came: those
of another version wait until what is in flight is done, and nobody waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.errors import BlobError, DependencyError, InfrastructureError
from headrace.schemas.events import GenerationRequested, PolicyPublished
from headrace.services.base import clock
from headrace.services.inference.engine import Weights
from headrace.services.inference.serving import ServedPolicy, Slot

Find = Callable[[str, int], Awaitable[PolicyPublished | None]]
"""From a policy's name and a version to its publication that counts; None where there is none."""


class PinnedVersions:
    """One policy's pinned versions. The engine is made when the first is asked for."""

    def __init__(
        self,
        name: str,
        make: Callable[[], ServedPolicy],
        find: Find,
        fetch: Callable[[PolicyPublished], Weights],
    ) -> None:
        """`make` makes the engine, and blocks; so does `fetch`, which verifies the weights."""
        self._name = name
        self._make = make
        self._find = find
        self._fetch = fetch
        self._served: ServedPolicy | None = None
        self._turn = asyncio.Lock()
        self._changing: asyncio.Task[None] | None = None
        self._changing_to = -1
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def take(self, request: GenerationRequested) -> tuple[ServedPolicy, Slot]:
        """Waits for the request's turn, and a slot. `done` must follow.

        InfrastructureError where the version can't be served, or the request expires first.
        """
        assert request.pinned is not None
        try:
            async with asyncio.timeout(max(0.0, request.expires_at / 1000 - clock.now())):
                async with self._turn:
                    served = await self._served_at(request.pinned)
                    slot = await served.slots.take()
                    self._in_flight += 1
                    self._idle.clear()
                    return served, slot
        except TimeoutError:
            waited = f"version {request.pinned} did not come to its turn in time"
            raise InfrastructureError("expired", waited, retryable=False) from None

    def done(self) -> None:
        """Says that a prompt which `take` let through is over."""
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    async def close(self) -> None:
        """Ends the engine, if there is one."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait({self._changing})
        if self._served is not None:
            await self._served.engine.close(drain_s=0)

    async def _served_at(self, version: int) -> ServedPolicy:
        while self._served is None or self._served.version != version:
            if self._changing is None:
                await self._idle.wait()
                self._changing = asyncio.create_task(self._change(version), name="pin")
                self._changing_to = version
            # A prompt that is cancelled here leaves no engine half loaded: the next one waits on.
            changing = self._changing
            await asyncio.wait({changing})
            self._changing = None
            error = changing.exception()
            if error is not None and self._changing_to == version:
                raise error
        return self._served

    async def _change(self, version: int) -> None:
        """Has the engine serve `version`."""
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
            message = f"version {version} of policy {self._name!r}: {error}"
            raise InfrastructureError("version_unavailable", message) from error
        self._served.version = version
        self._served.slots.notify()
