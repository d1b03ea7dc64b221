"""Rules about what an environment answers, and about worlds that must be the same."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.schemas.topics import MAX_RECORD_BYTES
from headrace.services.env.environment import Judge
from headrace.services.operate.conformance.conformance_report import NotChecked, require, rule
from headrace.services.operate.conformance.environment.environment_trial import (
    SEED,
    EnvironmentTrial,
    require_same,
    shown_text,
)

ODD_ACTIONS = ("", " ", "\n", "\x00", "🙂" * 20, "[" * 2000, "x" * 20_000)
"""What a policy may say that knows nothing yet."""
SPARE_BYTES = 64 * 1024
"""The part of a record that is not the observation."""


class ObservationRules:
    """The rules about observations, in the order in which they are tried."""

    def __init__(self, trial: EnvironmentTrial) -> None:
        self._trial = trial

    @rule(
        "Take the recipe's options as keyword arguments, and define the methods with `async def`.",
        limit_s=600,
    )
    async def starts(self) -> None:
        """The options make an environment with reset, step, aclose and replayable."""
        async with self._trial.environment(closing=False) as environment:
            for name in ("reset", "step", "aclose"):
                require(callable(getattr(environment, name, None)), f"it has no method {name}")
            await self._trial.close(environment)
            replayable = getattr(environment, "replayable", None)
            require(isinstance(replayable, bool), f"replayable is {replayable!r}, not a bool")
        fixed: Any = getattr(getattr(self._trial.setup, "make", None), "recipe_only", frozenset())
        right = isinstance(fixed, set | frozenset) and all(isinstance(one, str) for one in fixed)
        require(right, f"recipe_only is {fixed!r:.100}, not a frozenset of names")

    @rule(
        "Return headrace.Observation with a text, JSON data and finite rewards. What the policy "
        "does wrong is no exception: say so in an observation.",
        limit_s=300,
    )
    async def returns_observations(self) -> None:
        """reset() and step() return a valid Observation."""
        await self._trial.played()

    @rule(
        "Return an Observation that says what is wrong with the action. Raise nothing.",
        limit_s=300,
    )
    async def takes_any_action(self) -> None:
        """step() answers an action of any text with an observation."""
        for action in ODD_ACTIONS:
            async with self._trial.environment() as environment:
                first = await self._trial.observe(environment.reset(self._trial.task()), "reset")
                if first.done:
                    raise NotChecked("the episode is over after the reset")
                await self._trial.observe(environment.step(action), f"step ({action!r:.40})")

    @rule(
        "Shorten the text, or give large data out as files: Observation(artifacts=…).",
        limit_s=300,
    )
    async def observations_fit_a_record(self) -> None:
        """An observation fits into one record of the log."""
        played = await self._trial.played()
        for number, text in enumerate(played.shown):
            size, most = len(text.encode()), MAX_RECORD_BYTES - SPARE_BYTES
            where = "that of the reset" if number == 0 else f"that of step {number}"
            require(size <= most, f"{where} has {size} bytes; {most} are allowed")

    @rule(
        "Draw all random numbers from Random(task.seed), read no clock, sort sets, and keep no "
        "state outside of the instance. Or set replayable = False.",
        limit_s=300,
    )
    async def a_seed_repeats(self) -> None:
        """In one process, the same task with the same actions gives the same observations."""
        await self._trial.require_replayable()
        one, other = await self._trial.played(), await self._trial.played()
        require_same(one.shown, other.shown, "two episodes with the same seed and actions")

    @rule("Make the world of task.seed and task.payload alone, not of task.sample.", limit_s=300)
    async def samples_share_the_world(self) -> None:
        """All samples of a task have the same first observation."""
        await self._trial.require_replayable()
        found = []
        for sample in (0, 1):
            async with self._trial.environment() as environment:
                task = self._trial.task(sample)
                first = await self._trial.observe(environment.reset(task), "reset")
                found.append([shown_text(first)])
        require_same(found[0], found[1], "two samples of a task")

    @rule("Keep the state of an episode in `self`, not in the class or the module.", limit_s=300)
    async def episodes_are_apart(self) -> None:
        """Two episodes at the same time do not change each other."""
        await self._trial.require_replayable()
        seeds = (SEED, SEED + 1)  # Worlds of the same seed would look alike even if they are one.
        alone = [await self._trial.played(seed) for seed in seeds]
        together = await asyncio.gather(*(self._trial.played(seed) for seed in seeds))
        for one, other in zip(alone, together, strict=True):
            require_same(one.shown, other.shown, "an episode alone and one beside another")

    @rule("Make all state new in reset(), or leave --persistent and tasks.mode away.", limit_s=300)
    async def can_be_reset(self) -> None:
        """An instance can be reset, and then it is as a new one."""
        if not self._trial.persistent:
            raise NotChecked("instances are used once (give --persistent to check it)")
        async with self._trial.environment() as environment:
            one = await self._trial.play(environment)
            other = await self._trial.play(environment)
            if environment.replayable:
                require_same(one.shown, other.shown, "the first and the second episode")

    @rule("Return Observation(reward=…) from score().", limit_s=300)
    async def scores_are_finite(self) -> None:
        """score() returns an observation with a finite reward."""
        async with self._trial.environment() as environment:
            if not isinstance(environment, Judge):
                raise NotChecked("the environment has no method `score`, so it is no judge")
            if self._trial.score is None:
                raise NotChecked("give what it shall score with --score JSON")
            found = await self._trial.observe(environment.score(self._trial.score), "score")
            require(found.reward is not None, "the observation has no reward")
