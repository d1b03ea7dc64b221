"""Environments whose code catches its cancellation: their slots become free all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from headrace.services.base.clock import now_ms
from headrace.services.base.types import Observation
from headrace.services.env import slots as module
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.shard import EnvShard
from headrace.services.env.slots import EnvironmentSlots
from tests.unit.env.test_shard import Bench, Counter, action, run


class Stubborn(Counter):
    """Tries again after any exception, as many clients do."""

    async def step(self, action: str) -> Observation:
        try:
            await asyncio.Event().wait()
        except BaseException:
            await asyncio.sleep(0)
        return Observation(text="the server did not answer", reward=1.0)


def stubborn(
    test: Callable[[Bench, EnvironmentSlots], Coroutine[None, None, None]],
    step_s: float | None = None,
) -> None:
    async def main(bench: Bench) -> None:
        slots, Stubborn.closed = EnvironmentSlots(1), 0
        setups = {"default": EnvironmentSetup(Stubborn, {}, slots)}
        bounds = {} if step_s is None else {"default": step_s}
        bench.shard = EnvShard(bench.context, setups, "me", (), bounds)  # type: ignore[arg-type]
        await bench.live()
        await test(bench, slots)

    run(main)


def test_a_close_frees_the_slot() -> None:
    async def test(bench: Bench, slots: EnvironmentSlots) -> None:
        await bench.feed(action(0, "reset"), action(1))
        await bench.context.answers(1)
        while not slots.busy:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)  # The step runs.
        await bench.feed(action(2, "close"), action(0, "reset", task=2))
        answers = await bench.context.answers(3)
        assert (answers[-1].task, answers[-1].text) == (2, "0")
        assert (Stubborn.closed, slots.busy) == (1, 1)

    stubborn(test)


def test_the_deadline_frees_the_slot() -> None:
    async def test(bench: Bench, slots: EnvironmentSlots) -> None:
        expires_at = now_ms() + 1_000  # the step has begun by then, also on a busy machine
        await bench.feed(
            action(0, "reset", expires_at=expires_at), action(1, expires_at=expires_at)
        )
        async with asyncio.timeout(30):
            await bench.context.idle()
        assert (Stubborn.closed, slots.busy, bench.context.held) == (1, 0, set())

    stubborn(test)


def test_an_answer_after_the_limit_of_the_step_does_not_count() -> None:
    async def test(bench: Bench, slots: EnvironmentSlots) -> None:
        await bench.feed(action(0, "reset"), action(1))
        late = (await bench.context.answers(2))[1]
        assert late.failure is not None
        assert (late.failure.code, late.reward) == ("step_timeout", None)

    stubborn(test, step_s=0.5)


class Endless(Counter):
    """Never returns from a step, and sometimes not from its end, whatever the worker does."""

    in_step = True

    async def step(self, action: str) -> Observation:
        if self.in_step:
            await wait_for_ever()
        return await super().step(action)

    async def aclose(self) -> None:
        await wait_for_ever()


async def wait_for_ever() -> None:
    while not Endless.closed:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            continue


@pytest.mark.parametrize("in_step", [True, False], ids=["step", "aclose"])
@pytest.mark.parametrize("how", ["close", "deadline", "revoked"])
def test_a_call_that_never_returns_keeps_a_slot_that_is_known_to_be_stuck(
    how: str, in_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.2)
    monkeypatch.setattr(Endless, "in_step", in_step)

    async def main(bench: Bench) -> None:
        slots, Endless.closed = EnvironmentSlots(1), 0
        setups = {"default": EnvironmentSetup(Endless, {}, slots)}
        bench.shard = EnvShard(bench.context, setups, "me")  # type: ignore[arg-type]
        await bench.live()
        left_ms = 2_000 if how == "deadline" else 60_000
        expires_at = now_ms() + left_ms
        try:
            await bench.feed(action(0, "reset", expires_at=expires_at))
            await bench.feed(action(1, expires_at=expires_at))
            await bench.context.answers(1 if in_step else 2)
            if how == "close":
                await bench.feed(action(2, "close"))
            elif how == "revoked":
                await bench.shard.aclose()
                for task in bench.context.tasks:
                    task.cancel()
            assert slots.stuck() == 0
            async with asyncio.timeout(30):
                while not slots.stuck():
                    await asyncio.sleep(0.02)
        finally:
            Endless.closed = 1  # Otherwise this test would never end, either.
        if tasks := list(bench.context.tasks):
            _, running = await asyncio.wait(tasks, timeout=30)
            assert not running, "it ends at its deadline only"

    run(main)
