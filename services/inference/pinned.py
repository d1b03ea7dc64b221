"""Serves prompts that are pinned to a version, while another engine serves the newest version.

A second engine holds one pinned version at a time. It changes versions only if no prompt is in
flight, so all tokens of a pinned prompt come from its version.

The prompts of several versions may arrive mixed. To change the version, the engine must first end
what is in flight and then load weights, and both may take minutes. Meanwhile most of its slots are
empty. So versions take turns:

- A turn lasts TURN times as long as the change to it took: the draining and the loading. So about
  three quarters of the time are for sampling if equally many prompts of each version wait. In its
  turn, a version keeps the engine also if all its prompts are in flight.
- A version for which few prompts wait gets a shorter turn, in proportion.
- A turn ends early if a prompt of another version has waited for half of its time, or if nothing of
  the version is in flight or waits. But the prompts that waited for the turn are served first, as
  many as there are slots. A prompt still expires if draining and loading take longer than the
  other half of its time.
- Then the version is loaded that waits longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from headrace.errors import BlobError, DependencyError, InfrastructureError
from headrace.schemas.events import GenerationRequested, PolicyPublished
from headrace.services.base import clock
from headrace.services.inference.engine import FailingEngine, Weights
from headrace.services.inference.engine_slots import Slot
from headrace.services.inference.serving import ServedPolicy

TURN = 3.0
"""If other versions wait, a version is served for this many times as long as the change took."""
FindPublication = Callable[[str, int], Awaitable[PolicyPublished | None]]
"""Returns the valid publication of a policy's version, None if there is no such publication."""


@dataclass(eq=False)
class _Prompt:
    """A prompt that waits for its version and for a slot."""

    slot: asyncio.Future[tuple[ServedPolicy, Slot]]
    half_at: float
    """When half of the time until it expires has passed, in seconds of the event loop's clock."""


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
        self._made = asyncio.Event()
        self._waiting: dict[int, deque[_Prompt]] = {}
        """By version. Among those that are not loaded, the first one waits longest."""
        self._serving: asyncio.Task[None] | None = None
        self._turn_ends = 0.0
        self._guaranteed = 0
        """Prompts that are served even if the turn has ended."""
        self._news = asyncio.Event()
        """Set if a prompt came, or if nothing is in flight."""
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

    async def failed(self) -> None:
        """Waits until the engine can't recover, and then raises HeadraceError."""
        await self._made.wait()
        if self._served is not None and isinstance(self._served.engine, FailingEngine):
            await self._served.engine.failed()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Closes the engine, if there is one."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        if self._served is not None:
            await self._served.engine.close(drain_s=0)

    async def _take(self, request: GenerationRequested) -> tuple[ServedPolicy, Slot]:
        assert request.pinned is not None
        loop = asyncio.get_running_loop()
        left_s = max(0.0, request.expires_at / 1000 - clock.now())
        waiting: asyncio.Future[tuple[ServedPolicy, Slot]] = loop.create_future()
        prompt = _Prompt(waiting, loop.time() + left_s / 2)
        self._waiting.setdefault(request.pinned, deque()).append(prompt)
        self._news.set()
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="pinned")
        try:
            async with asyncio.timeout(left_s):
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
            self._news.set()

    async def _serve(self) -> None:
        """Gives slots to the waiting prompts, until no prompt waits."""
        while (version := self._next()) is not None:
            if self._served is None or self._served.version != version:
                await self._change(version)
            elif prompts := self._waiting.get(version):
                await self._give_slot(self._served, prompts)
            else:
                await self._keep(version)

    def _next(self) -> int | None:
        """Returns the version that has the engine next; None if no prompt waits."""
        for version, prompts in list(self._waiting.items()):
            while prompts and prompts[0].slot.done():
                prompts.popleft()
            if not prompts:
                del self._waiting[version]
        served = self._served.version if self._served is not None else -1
        others = [version for version in self._waiting if version != served]
        if not others or (served in self._waiting and self._guaranteed > 0):
            return served if served in self._waiting else None
        in_turn = asyncio.get_running_loop().time() < self._end_of_turn(served)
        if in_turn and (served in self._waiting or self._in_flight > 0):
            return served
        return others[0]

    def _end_of_turn(self, served: int) -> float:
        half = (prompts[0].half_at for one, prompts in self._waiting.items() if one != served)
        return min(self._turn_ends, *half)

    async def _keep(self, version: int) -> None:
        """Waits for the end of the turn, or for a prompt, or until nothing is in flight."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._end_of_turn(version)):
                await self._news.wait()

    async def _give_slot(self, served: ServedPolicy, prompts: deque[_Prompt]) -> None:
        slot = await served.slots.take(served.permits)
        waiting = prompts.popleft().slot
        if waiting.done():
            slot.free()
            return
        self._guaranteed -= 1
        self._in_flight += 1
        self._idle.clear()
        waiting.set_result((served, slot))

    async def _change(self, version: int) -> None:
        """Drains the engine, loads a version and begins its turn.

        If that fails, the prompts that wait for the version fail.
        """
        time = asyncio.get_running_loop().time
        begun = time()
        before = self._served.version if self._served is not None else -1
        await self._idle.wait()
        try:
            await self._load(version)
        # Whatever it is, each prompt that waits must get it: nobody else waits for this task.
        except Exception as error:
            for prompt in self._waiting.pop(version, ()):
                if not prompt.slot.done():
                    prompt.slot.set_exception(error)
        if before in self._waiting:  # the others that wait come before its next turn
            self._waiting[before] = self._waiting.pop(before)
        self._begin_turn(version, time() - begun)

    def _begin_turn(self, version: int, change_s: float) -> None:
        counts = {
            one: sum(not prompt.slot.done() for prompt in prompts)
            for one, prompts in self._waiting.items()
        }
        own = counts.pop(version, 0)
        share = min(1.0, own / max([1, *counts.values()]))
        self._turn_ends = asyncio.get_running_loop().time() + TURN * share * change_s
        slots = self._served.engine.capacity().free_slots if self._served is not None else 0
        self._guaranteed = min(own, max(1, slots))

    async def _load(self, version: int) -> None:
        try:
            published = await self._find(self._name, version)
            if published is None:
                unknown = f"version {version} of policy {self._name!r} was never published"
                raise InfrastructureError("version_unavailable", unknown, retryable=False)
            weights = await asyncio.to_thread(self._fetch, published)
            if self._served is None:
                self._served = await asyncio.to_thread(self._make)
                self._made.set()
            self._served.version = -1
            await self._served.engine.load(weights)
        except (BlobError, DependencyError) as error:
            message = f"version {version} of policy {self._name!r} can't be served: {error}"
            raise InfrastructureError("version_unavailable", message) from error
        self._served.version = version
        self._served.slots.notify()
