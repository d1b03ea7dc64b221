"""Who gets the next slot of an engine, if several prompts wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from headrace.schemas.events import LimitShare, LimitShared
from headrace.services.inference import engine_slots
from headrace.services.inference.engine import Capacity, Engine
from headrace.services.inference.engine_slots import Slot, Slots
from headrace.services.worker.limits.held_limits import HeldLimits
from headrace.services.worker.limits.limits_of import Limit
from headrace.services.worker.limits.shared_limits import Permits, SharedLimits

LIMIT = "policies.default.limits.in_flight"


class FewSlots:
    """An engine's slots. A prompt leaves `running` when its test says so."""

    def __init__(self, slots: int) -> None:
        self.slots, self.running = slots, 0

    def capacity(self) -> Capacity:
        return Capacity(self.slots - self.running, 1000)


class Prompts:
    """Prompts that ask for slots of an engine, and the order in which they got them."""

    def __init__(self, slots: int = 1) -> None:
        self.engine = FewSlots(slots)
        self.slots = Slots(cast(Engine, self.engine))
        self.got: list[str] = []
        self.held: list[Slot] = []
        self.gone: set[str] = set()
        """Those that give up."""

    def ask(self, name: str, permits: Permits | None = None) -> asyncio.Task[None]:
        async def wait() -> None:
            slot = await self.slots.take_unless(lambda: name in self.gone, permits)
            if slot is not None:
                self.got.append(name)
                self.held.append(slot)

        return asyncio.create_task(wait())

    async def free(self) -> None:
        """Frees the oldest slot that is held, and lets everyone look."""
        self.held.pop(0).free()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def few_permits(units: int, kinds: int) -> list[Permits]:
    """Permits of several kinds, which share a limit."""
    held = HeldLimits("w", {LIMIT: Limit(units)}, lease=1)
    share = LimitShare(worker="w", lease=1, units=units, reserved=units)
    held.on_shared(LimitShared(limit=LIMIT, number=0, units=units, period_ms=0, shares=(share,)))
    now_s = asyncio.get_running_loop().time()
    held.on_delivered(1, now_s, now_s)
    shared = SharedLimits("w", {})
    return [Permits(shared, held, [LIMIT]) for _ in range(kinds)]


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


def in_use(slots: Slots) -> tuple[int, int, int]:
    return slots.waiting, slots.busy, slots.starting


def test_a_partition_that_takes_without_pausing_leaves_the_others_their_turns() -> None:
    async def main() -> None:
        engine = FewSlots(8)
        slots = Slots(cast(Engine, engine))
        got: Counter[str] = Counter()

        async def generate(slot: Slot) -> None:
            slot.start()
            engine.running += 1
            await asyncio.sleep(0.001)
            engine.running -= 1
            slot.free()

        async def pump(name: str) -> None:
            while got.total() < 400:
                slot = await slots.take()
                got[name] += 1
                running.append(asyncio.create_task(generate(slot)))

        running: list[asyncio.Task[None]] = []
        await asyncio.gather(*(pump(name) for name in "abc"))
        await asyncio.gather(*running)
        assert min(got[name] for name in "abc") > 100
        assert in_use(slots) == (0, 0, 0)

    drive(main)


def test_slots_go_to_whoever_came_first() -> None:
    async def main() -> None:
        prompts = Prompts(slots=2)
        for name in "abcde":
            prompts.ask(name)
        await settle()
        assert (prompts.got, in_use(prompts.slots)) == (["a", "b"], (3, 2, 2))
        for slot in prompts.held:
            slot.free()
        newcomer = prompts.ask("f")
        await settle()
        assert prompts.got == ["a", "b", "c", "d"], "nobody passes those that wait"
        prompts.engine.slots = 9
        prompts.slots.notify()
        await newcomer
        assert prompts.got == ["a", "b", "c", "d", "e", "f"], "the first one wakes the next"

    drive(main)


def test_who_leaves_the_queue_lets_the_next_one_go() -> None:
    async def main() -> None:
        prompts = Prompts()
        asked = {name: prompts.ask(name) for name in "abcde"}
        await settle()
        prompts.held.pop(0).free()  # wakes b, which is cancelled before it can look
        asked["b"].cancel()
        await settle()
        assert prompts.got == ["a", "c"]
        prompts.gone.add("d")
        prompts.slots.notify()
        await asked["d"]
        assert in_use(prompts.slots) == (1, 1, 1)
        await prompts.free()
        assert prompts.got == ["a", "c", "e"]
        assert in_use(prompts.slots) == (0, 1, 1)

    drive(main)


def test_who_lacks_a_permit_holds_up_nobody_and_keeps_its_place() -> None:
    async def main() -> None:
        prompts = Prompts(slots=2)
        left, right = few_permits(units=1, kinds=2)
        for name, permits in (("a", left), ("b", left), ("c", right), ("d", None), ("e", None)):
            prompts.ask(name, permits)
        await settle()
        assert prompts.got == ["a", "d"], "b and c need the permit that a has"
        assert (left.waiting, right.waiting, prompts.slots.waiting) == (1, 1, 3)
        await prompts.free()
        assert prompts.got == ["a", "d", "b"]
        await prompts.free()
        assert prompts.got == ["a", "d", "b", "e"]
        await prompts.free()
        assert prompts.got == ["a", "d", "b", "e", "c"]
        assert (left.waiting, right.waiting, prompts.slots.waiting) == (0, 0, 0)

    drive(main)


def test_engines_that_share_a_limit_take_turns() -> None:
    async def main() -> None:
        both = [Prompts(slots=9), Prompts(slots=9)]
        for prompts, permits in zip(both, few_permits(units=1, kinds=2), strict=True):
            permits.listen(prompts.slots.notify)
            for name in "abcdef":
                prompts.ask(name, permits)
        await settle()
        for _ in range(5):
            await next(prompts for prompts in both if prompts.held).free()
        assert [len(prompts.got) for prompts in both] == [3, 3]

    drive(main)


def test_a_first_prompt_without_a_permit_asks_for_a_report() -> None:
    async def main() -> None:
        asked = []
        shared = SharedLimits("w", {LIMIT: Limit(1)})
        shared.report_soon = lambda: asked.append(1)
        permits = shared.permits([LIMIT])
        prompts = Prompts()
        prompts.ask("a", permits)
        await settle()
        assert len(asked) == 1
        prompts.ask("b", permits)
        await settle()
        assert len(asked) == 1, "the scheduler knows already"

    drive(main)


def test_everyone_looks_again_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(engine_slots, "RECHECK_S", 0.01)
        prompts = Prompts()
        prompts.ask("a")
        first, second, third = (prompts.ask(name) for name in "bcd")
        await asyncio.sleep(0.03)
        assert prompts.got == ["a"]
        prompts.gone.add("c")
        await second
        assert not first.done()
        prompts.engine.slots = 2
        await first
        prompts.engine.slots = 3
        await third
        assert prompts.got == ["a", "b", "d"]

    drive(main)
