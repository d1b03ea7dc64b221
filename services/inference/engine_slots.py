"""The slots of an engine, and the queue of the prompts that wait for one."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count

from headrace.services.inference.engine import Engine
from headrace.services.worker.limits.shared_limits import Call, Permits

RECHECK_S = 1.0
"""After this time an engine's capacity is read again: it may change without a notification."""


@dataclass(order=True)
class _Waiter:
    """A prompt that waits for a slot."""

    rank: tuple[int, int]
    """Minus its priority, and the number of its arrival. The lowest goes first."""
    look: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Set when it should look whether it gets a slot now."""


class Slots:
    """The slots of one engine. The prompt of the highest priority gets the next one that is free.

    Of equal priorities, whoever came first gets it. No prompt in a slot is interrupted. As long as
    prompts of a higher priority wait, those of a lower one wait, too. A prompt that lacks a permit
    keeps its place, and is passed over by those that lack none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queues: dict[Permits | None, list[_Waiter]] = {}
        """By what the prompts need besides a slot: those that wait, in their order. Never empty."""
        self._arrivals = count()
        self._recheck: asyncio.TimerHandle | None = None
        self.starting = 0
        """Slots that were taken and whose prompts the engine has not received yet."""
        self.busy = 0
        """Slots that were taken and not freed."""

    @property
    def waiting(self) -> int:
        """Prompts that wait for a slot."""
        return sum(map(len, self._queues.values()))

    async def take(self, permits: Permits | None = None) -> Slot:
        """Waits for a free slot, and for a permit if there are `permits`.

        No slot is free while the engine's context is unknown.
        """
        slot = await self.take_unless(lambda: False, permits)
        assert slot is not None
        return slot

    async def take_unless(
        self, given_up: Callable[[], bool], permits: Permits | None = None, priority: int = 0
    ) -> Slot | None:
        """As `take`. Returns None if `given_up()` becomes true before a slot is free."""
        waiter = self._join(permits, priority)
        try:
            while not self._is_next(waiter):
                if given_up():
                    return None
                if permits is not None and not permits.any_free():
                    permits.lacks()
                if self._recheck is None:
                    self._recheck = asyncio.get_running_loop().call_later(RECHECK_S, self._wake_all)
                waiter.look.clear()
                await waiter.look.wait()
            return Slot(self, permits.take(self.notify) if permits is not None else None)
        finally:
            self._leave(waiter, permits)

    def notify(self) -> None:
        """Wakes those that are first: the capacity may have grown, or they may give up."""
        for queue in self._queues.values():
            queue[0].look.set()

    def _wake_all(self) -> None:
        self._recheck = None
        for queue in self._queues.values():
            for waiter in queue:
                waiter.look.set()

    def _join(self, permits: Permits | None, priority: int) -> _Waiter:
        waiter = _Waiter((-priority, next(self._arrivals)))
        insort(self._queues.setdefault(permits, []), waiter)
        if permits is not None:
            permits.waiting += 1
        return waiter

    def _leave(self, waiter: _Waiter, permits: Permits | None) -> None:
        queue = self._queues[permits]
        del queue[bisect_left(queue, waiter)]
        if not queue:
            del self._queues[permits]
        if permits is not None:
            permits.waiting -= 1
        self.notify()  # another one is first now

    def _is_next(self, waiter: _Waiter) -> bool:
        """Whether a slot is free, and this is the first prompt that lacks nothing else."""
        capacity = self._engine.capacity()
        if capacity.context <= 0 or capacity.free_slots <= self.starting:
            return False
        able = (
            queue[0]
            for permits, queue in self._queues.items()
            if permits is None or permits.any_free()
        )
        return min(able, default=None) is waiter


class Slot:
    """One slot, from `Slots.take` to `free`. `start` and `free` may be called more than once."""

    def __init__(self, slots: Slots, call: Call | None = None) -> None:
        self._slots = slots
        self._call = call
        self._starting = True
        self._held = True
        slots.starting += 1
        slots.busy += 1

    def start(self) -> None:
        """Records that the engine received the prompt and counts it in its capacity."""
        if self._starting:
            self._starting = False
            self._slots.starting -= 1

    def permitted(self) -> AbstractAsyncContextManager[None]:
        """Surrounds the engine's work. Raises LeaseOver if the worker must not go on with it."""
        return nullcontext() if self._call is None else self._call.running()

    def free(self) -> None:
        """Returns the slot, whether or not the engine received a prompt."""
        self.start()
        if self._call is not None:
            self._call.release()
        if self._held:
            self._held = False
            self._slots.busy -= 1
        self._slots.notify()
