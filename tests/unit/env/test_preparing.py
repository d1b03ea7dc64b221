"""A setup gets what an episode needs before that has a slot, and outside its reset's time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.errors import InfrastructureError
from headrace.schemas.events import EnvironmentUse
from headrace.services.base.clock import now_ms
from headrace.services.env.environment import Claim
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.slots import EnvironmentSlots
from tests.unit.env.test_shard import Bench, Counter, action, run


class Preparing(EnvironmentSetup):
    """Waits for `got` before each episode. Its calls are in `held`, `left` and `resumed`."""

    def __init__(self, slots: int) -> None:
        super().__init__(Counter, {}, EnvironmentSlots(slots))
        self.got = asyncio.Event()
        self.error: InfrastructureError | None = None
        self.held = self.left = 0
        self.resumed: list[bool] = []

    @asynccontextmanager
    async def prepared(
        self, use: EnvironmentUse, claim: Claim, resumed: bool
    ) -> AsyncIterator[None]:
        self.resumed.append(resumed)
        await self.got.wait()
        if self.error is not None:
            raise self.error
        self.held += 1
        try:
            yield
        finally:
            self.left += 1


def preparing(bench: Bench, slots: int = 1) -> Preparing:
    setup = Preparing(slots)
    bench.shard._setups = {"default": setup}
    return setup


def test_a_reset_that_waits_does_not_fail_and_takes_no_slot() -> None:
    async def test(bench: Bench) -> None:
        setup = preparing(bench)
        await bench.live()
        await bench.feed(action(0, "reset"))
        await asyncio.sleep(0.2)  # step_s is 0.1
        assert not bench.context.sent
        assert (setup.slots.waiting, setup.slots.busy) == (1, 0)
        assert not setup.slots.busy
        setup.got.set()
        (answer,) = await bench.context.answers(1)
        assert (answer.text, answer.failure, setup.held) == ("0", None, 1)
        await bench.feed(action(1, "close"))
        await bench.context.idle()
        assert (setup.left, setup.resumed) == (1, [False])

    run(test, step_s=0.1)


def test_what_cannot_be_got_is_a_failure_of_the_infrastructure() -> None:
    async def test(bench: Bench) -> None:
        setup = preparing(bench)
        setup.error = InfrastructureError("pull_failed", "the registry is away")
        setup.got.set()
        await bench.live()
        await bench.feed(action(0, "reset"), action(1))
        for answer in await bench.context.answers(2):
            assert answer.failure is not None
            assert (answer.failure.origin, answer.failure.code) == ("infrastructure", "pull_failed")
            assert answer.failure.retryable
            assert answer.reward is None
        assert Counter.made == 0

    run(test)


def test_a_close_and_a_deadline_end_the_wait() -> None:
    async def test(bench: Bench) -> None:
        setup = preparing(bench)
        await bench.live()
        await bench.feed(action(0, "reset"), action(1, "close"))
        await bench.context.idle()
        await bench.feed(action(0, "reset", task=2, expires_at=now_ms() + 100))
        await bench.context.idle()
        assert (setup.held, bench.context.held, bench.context.sent) == (0, set(), [])

    run(test)
