"""Rules about an environment's life: how long calls take, how it ends, what it leaves behind."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from headrace.errors import InfrastructureError
from headrace.services.env.environment import Environment, Resumable
from headrace.services.env.setup import CLOSE_S, is_named
from headrace.services.operate.conformance.conformance_report import (
    NotChecked,
    Violation,
    require,
    rule,
)
from headrace.services.operate.conformance.environment.environment_trial import (
    EnvironmentTrial,
    Played,
    RaisedByPlugIn,
    require_same,
)
from headrace.services.operate.conformance.traces import Leftovers, require_free_loop

BEGUN_S = 0.05
"""Seconds after which a call counts as begun."""


class LifeRules:
    """The rules about its life, in the order in which they are tried."""

    def __init__(self, trial: EnvironmentTrial) -> None:
        self._trial = trial

    @rule(
        "Call what is slow with `await asyncio.to_thread(…)`. All episodes of a worker wait "
        "meanwhile.",
        limit_s=300,
    )
    async def blocks_no_loop(self) -> None:
        """No call blocks the asyncio loop."""
        await require_free_loop(self._trial.played, self._trial.blocked_s)

    @rule("Note that the episode is over, and answer later steps at once.", limit_s=300)
    async def a_step_after_the_end_returns(self) -> None:
        """A step after the end comes back: with an observation, or with an exception."""
        async with self._trial.environment() as environment:
            played = await self._trial.play(environment)
            if not played.ended:
                raise NotChecked(
                    f"the episode did not end within {self._trial.steps} steps: give --action "
                    "texts that end it, or raise --steps"
                )
            action = self._trial.actions[0]
            with suppress(RaisedByPlugIn):
                await self._trial.observe(environment.step(action), "the step after the end")

    @rule("Let asyncio.CancelledError pass, and release what is held in aclose().")
    async def a_cancelled_call_ends(self) -> None:
        """A call that is cancelled ends, and then aclose() works."""
        for name in ("reset", "step"):
            async with self._trial.environment(closing=False) as environment:
                if name == "step":
                    await self._trial.observe(environment.reset(self._trial.task()), "reset")
                await self._cancelled(environment, name)
                await self._trial.close(environment)

    async def _cancelled(self, environment: Environment, name: str) -> None:
        work = (
            environment.reset(self._trial.task())
            if name == "reset"
            else environment.step(self._trial.actions[0])
        )
        running = asyncio.ensure_future(work)
        await asyncio.wait([running], timeout=BEGUN_S)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=CLOSE_S)
        require(bool(done), f"{name} went on for {CLOSE_S:g} s after it was cancelled")
        with suppress(asyncio.CancelledError):
            running.exception()  # Whatever it is, the call has ended.

    @rule("Release in aclose() what is there, and nothing else. It has 2 seconds.")
    async def closes_at_any_time(self) -> None:
        """aclose() works before the reset, too, and when it is repeated."""
        async with self._trial.environment(closing=False) as environment:
            await self._trial.close(environment)
        async with self._trial.environment(closing=False) as environment:
            await self._trial.observe(environment.reset(self._trial.task()), "reset")
            await self._trial.close(environment)
            await self._trial.close(environment)

    @rule("Find the environment by its name in resume(), and leave it as it is.", limit_s=300)
    async def resumes(self) -> None:
        """After release(), resume() of a new instance finds the same world."""
        whole = await self._trial.played()
        done = len(whole.observations) // 2
        async with self._trial.environment(closing=False) as environment:
            try:
                begun = await self._begun_and_released(environment, done)
            except BaseException:
                with suppress(Violation):
                    await self._trial.close(environment)
                raise
        async with self._trial.environment() as again:
            assert isinstance(again, Resumable)
            self._name(again)
            await self._trial.call(again.resume(self._trial.task(), done), "resume")
            rest = await self._trial.play(again, done=done) if done else None
        if again.replayable and rest is not None:
            require_same(whole.shown, begun.shown + rest.shown, "a whole and a resumed episode")

    async def _begun_and_released(self, environment: Environment, steps: int) -> Played:
        if not isinstance(environment, Resumable):
            raise NotChecked("the environment has no resume and release")
        self._name(environment)
        begun = await self._trial.play(environment, most=steps)
        await self._trial.call(environment.release(), "release")
        return begun

    def _name(self, environment: Environment) -> None:
        """Gives instances the same name, if they take one."""
        if is_named(environment):
            environment.set_name(f"{self._trial.namespace}.resumes")

    @rule('Raise InfrastructureError("sandbox_lost") in resume().', limit_s=300)
    async def refuses_to_resume_what_is_gone(self) -> None:
        """resume() raises InfrastructureError if there is nothing to resume."""
        async with self._trial.environment() as environment:
            if not isinstance(environment, Resumable):
                raise NotChecked("the environment has no resume and release")
            try:
                async with asyncio.timeout(self._trial.call_s):
                    await environment.resume(self._trial.task(), 0)
            except InfrastructureError:
                return
        raise Violation("resume of an episode that never began returned")

    @rule("End in aclose() what the episode has started.", limit_s=300)
    async def leaves_nothing(self) -> None:
        """After aclose() no process and no asyncio task is left."""
        await self._trial.played()  # What all instances share may stay.
        before = Leftovers()
        await self._trial.played()
        await before.require_none("after aclose()")
