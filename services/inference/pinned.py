"""Serves prompts that are pinned to a version, while another engine serves the newest version.

A second engine holds one pinned version at a time. It changes versions only if no prompt is in
flight, so all tokens of a pinned prompt come from its version.

Loading takes a while, and the prompts of several versions may arrive mixed. So a prompt of the
version that is loaded overtakes those of other versions, until it has been served for TURN times as
long as its loading took. Then the version is loaded that waits longest. So most of the time is for
sampling, and no prompt waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from headrace.errors import BlobError, DependencyError, InfrastructureError
from headrace.schemas.events import GenerationRequested, PolicyPublished
from headrace.services.base import clock
from headrace.services.inference.engine import Weights
from headrace.services.inference.serving import ServedPolicy, Slot

TURN = 10.0
"""If other versions wait, a version is served for this many times as long as its loading took."""
FindPublication = Callable[[str, int], Awaitable[PolicyPublished | None]]
"""Returns the valid publication of a policy's version, None if there is no such publication."""

_Waiting = asyncio.Future[tuple[ServedPolicy, Slot]]
"""A prompt that waits for its version and for a slot."""


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
        self._waiting: dict[int, deque[_Waiting]] = {}
        """By version. Among those that are not loaded, the first one waits longest."""
        self._serving: asyncio.Task[None] | None = None
        self._turn_ends = 0.0
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
            self._return(slot)

    async def close(self) -> None:
        """Closes the engine, if there is one."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        if self._served is not None:
            await self._served.engine.close(drain_s=0)

    async def _take(self, request: GenerationRequested) -> tuple[ServedPolicy, Slot]:
        assert request.pinned is not None
        waiting: _Waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request.pinned, deque()).append(waiting)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="pinned")
        try:
            async with asyncio.timeout(max(0.0, request.expires_at / 1000 - clock.now())):
                try:
                    return await waiting
                except asyncio.CancelledError:
                    # It may have got its slot in the same moment.
                    if not waiting.cancelled() and waiting.exception() is None:
                        self._return(waiting.result()[1])
                    raise
        except TimeoutError:
            reason = f"version {request.pinned} could not be served before the request expired"
            raise InfrastructureError("expired", reason, retryable=False) from None

    def _return(self, slot: Slot) -> None:
        slot.free()
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    async def _serve(self) -> None:
        """Gives slots to the waiting prompts, until no prompt waits."""
        while (version := self._next()) is not None:
            if self._served is None or self._served.version != version:
                await self._idle.wait()
                await self._load(version)
            if self._served is not None and self._served.version == version:
                await self._give_slot(self._served, self._waiting[version])

    async def _give_slot(self, served: ServedPolicy, prompts: deque[_Waiting]) -> None:
        slot = await served.slots.take()
        waiting = prompts.popleft()
        if waiting.done():
            slot.free()
            return
        self._in_flight += 1
        self._idle.clear()
        waiting.set_result((served, slot))

    def _next(self) -> int | None:
        """Returns the version of the next prompt; None if no prompt waits."""
        for version, prompts in list(self._waiting.items()):
            while prompts and prompts[0].done():
                prompts.popleft()
            if not prompts:
                del self._waiting[version]
        served = self._served.version if self._served is not None else -1
        others = [version for version in self._waiting if version != served]
        turn = asyncio.get_running_loop().time() < self._turn_ends
        if served in self._waiting and (turn or not others):
            return served
        return next(iter(others), None)

    async def _load(self, version: int) -> None:
        """Loads a version and begins its turn. If that fails, the prompts that wait for it fail."""
        time = asyncio.get_running_loop().time
        begun = time()
        before = self._served.version if self._served is not None else -1
        try:
            await self._change(version)
        except Exception as error:
            for waiting in self._waiting.pop(version, ()):
                if not waiting.done():
                    waiting.set_exception(error)
        self._turn_ends = time() + TURN * (time() - begun)
        if before in self._waiting:  # the others that wait come before its next turn
            self._waiting[before] = self._waiting.pop(before)

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
