"""What the slots of an environment measure."""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from headrace.errors import HeadraceError
from headrace.services.base.clock import now
from headrace.services.env.slots import NEWEST, STUCK_S, EnvironmentSlots, Mean
from tests.simulation.virtual_time import VirtualTimeLoop


def test_slots_count_those_in_use_and_those_that_wait() -> None:
    loop = VirtualTimeLoop(0)

    async def main() -> None:
        slots = EnvironmentSlots(2)

        async def use(seconds: float) -> None:
            async with slots.slot(lambda: inf):
                await asyncio.sleep(seconds)

        tasks = [asyncio.create_task(use(seconds)) for seconds in (1.0, 2.0, 3.0, 9.0)]
        await asyncio.sleep(0.5)
        assert (slots.busy, slots.waiting, slots.open_s.value) == (2, 2, 0.0)
        tasks[3].cancel()
        await asyncio.sleep(1.0)
        assert (slots.busy, slots.waiting) == (2, 0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (slots.busy, slots.waiting) == (0, 0)
        assert round(slots.open_s.value, 6) == 2.0

    loop.run_until_complete(main())
    loop.close()


def test_a_mean_follows_what_is_new() -> None:
    mean = Mean()
    for _ in range(1000):
        mean.add(1.0)
    for _ in range(4 * NEWEST):
        mean.add(3.0)
    assert 2.9 < mean.value <= 3.0


def test_a_clock_that_is_set_back_makes_no_mean_negative() -> None:
    mean = Mean()
    mean.add(-3600.0)
    assert mean.value == 0.0


def test_a_worker_ends_when_half_of_its_slots_are_stuck(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        slots, late = EnvironmentSlots(4), now() - STUCK_S - 1
        async with slots.slot(lambda: inf), slots.slot(lambda: now()):
            slots.require_free("default")
            async with slots.slot(lambda: late):
                assert slots.stuck() == 1
                slots.require_free("default")
                slots.require_free("default")
                assert caplog.text.count("1 of 4 slots of environments.default are stuck") == 1
                async with slots.slot(lambda: late):
                    with pytest.raises(HeadraceError, match="2 of 4 slots"):
                        slots.require_free("default")
        assert slots.stuck() == 0

    asyncio.run(main())
