"""Persistent environments wait in a pool that is bounded."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import EnvironmentUse
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.slots import EnvironmentSlots

CLAIM = Claim(1, 0, 0, partition=0, offset=0, expires_at=1e12)
SLOTS = 3


class Counted:
    """An environment that knows how many of its kind are open."""

    replayable = False
    is_open: list[Counted]

    def __init__(self, key: int = 0) -> None:
        self.key = key
        self.is_open.append(self)

    async def reset(self, task: TaskView) -> Observation:
        raise NotImplementedError

    async def step(self, action: str) -> Observation:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.is_open.remove(self)


def use(key: int) -> EnvironmentUse:
    return EnvironmentUse(use="counted", mode="persistent", options=f'{{"key": {key}}}')


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_idle_environments_are_as_many_as_slots_whatever_options_tasks_have(
    acts: list[tuple[bool, int]],
) -> None:
    async def main() -> None:
        Counted.is_open = []
        setup = EnvironmentSetup(Counted, {}, EnvironmentSlots(SLOTS))
        taken: list[tuple[int, Environment]] = []
        for takes, key in acts:
            if takes and len(taken) < SLOTS:
                environment = await setup.take(use(key), CLAIM)
                assert isinstance(environment, Counted)
                assert environment.key == key
                taken.append((key, environment))
            elif taken:
                of, environment = taken.pop(key % len(taken))
                await setup.give_back(use(of), environment, fit=True)
                again = await setup.take(use(of), CLAIM)
                assert again is environment, "the one that was used last stays"
                await setup.give_back(use(of), again, fit=True)
            assert len(Counted.is_open) <= len(taken) + SLOTS
        for of, environment in taken:
            await setup.give_back(use(of), environment, fit=True)
        await setup.close_pool()
        assert Counted.is_open == []

    asyncio.run(main())
