"""Rules for agents: what they ask for, how they end, and what they leave alone."""

from __future__ import annotations

import asyncio
from math import isfinite

from headrace.services.agent.episode_run import AGENT_CLOSE_S, EpisodeRun
from headrace.services.operate.conformance.agent.agent_trial import (
    AgentTrial,
    require_same_requests,
)
from headrace.services.operate.conformance.agent.outside_calls import outside_calls
from headrace.services.operate.conformance.agent.scripted_episode import FAILURE
from headrace.services.operate.conformance.conformance_report import NotChecked, require, rule
from headrace.services.operate.conformance.traces import (
    Leftovers,
    require_free_loop,
    require_in_time,
)

DEADLINE_S = 1
"""The deadline of an episode in which nobody answers."""
LATE_S = AGENT_CLOSE_S + 1.0
"""Seconds after a cancellation or a deadline at which the episode must be over."""
MOST_CUTS = 6
"""Most crashes that are tried, each at another request."""
TOGETHER = 3
"""How many episodes run at the same time, each with a script of its own."""
ENDLESS = 1_000_000


class AgentRules:
    """The rules for agents, in the order in which they are tried."""

    def __init__(self, trial: AgentTrial) -> None:
        self._trial = trial

    @rule(
        "Return from the coroutine when observation.done is true. Raise nothing, and await each "
        "request."
    )
    async def plays_an_episode(self) -> None:
        """The episode is finished when the environment is done."""
        await self._trial.played()

    @rule("Call episode.generate or episode.chat: otherwise nothing is learned.")
    async def asks_a_policy(self) -> None:
        """The agent asks a policy at least once."""
        played = await self._trial.played()
        asked = [one for one in played.requests.values() if one.startswith("asks ")]
        require(bool(asked), "it asked no policy")

    @rule("Set episode.reward, episode.rewards and episode.metrics to finite numbers.")
    async def rewards_are_finite(self) -> None:
        """Rewards and metrics are finite numbers."""
        played = (await self._trial.played()).trajectory
        assert played is not None, "the agent asked for something"
        values = {"reward": played.reward or 0.0, **played.rewards, **played.metrics}
        for name, value in values.items():
            require(isfinite(value), f"{name} is {value}")

    @rule(
        "Use episode.random for random numbers, and no clock. Sort sets. Keep no state outside of "
        "the coroutine."
    )
    async def repeats_its_requests(self) -> None:
        """In one process, it asks for the same things if it gets the same answers."""
        self._trial.require_replayable()
        one, other = await self._trial.played(), await self._trial.played()
        require_same_requests(one.requests, other.requests, "two episodes with the same answers")

    @rule("Use episode.gather for requests at the same time, never asyncio.gather.", limit_s=120)
    async def continues_after_a_crash(self) -> None:
        """With recorded answers it goes on where they end."""
        self._trial.require_replayable()
        whole = await self._trial.played()
        calls = list(whole.answers)
        for number in range(0, len(calls), max(1, len(calls) // MOST_CUTS)):
            recorded = calls[: number + 1]
            continued = self._trial.episode(before=whole, calls=recorded)
            again = await self._trial.played(continued)
            require(
                again.attempts == 1,
                f"with {len(recorded)} recorded answers it asked for something else than before",
            )
            left = {k: v for k, v in whole.requests.items() if k not in recorded}
            require_same_requests(left, again.requests, "an episode before and after a crash")
            assert whole.outcome is not None
            assert again.outcome is not None
            first, then = whole.outcome.reward, again.outcome.reward
            require(first == then, f"the reward was {first} and then {then}")

    @rule("Keep what belongs to an episode in local variables, not in the class or the module.")
    async def episodes_are_apart(self) -> None:
        """Two episodes at the same time do not change each other."""
        self._trial.require_replayable()
        trial = self._trial
        scripts = [trial.script.turned(by) for by in range(TOGETHER)]
        alone = [await trial.played(trial.episode(one)) for one in scripts]
        together = await asyncio.gather(*(trial.played(trial.episode(one)) for one in scripts))
        for one, other in zip(alone, together, strict=True):
            require_same_requests(
                one.requests, other.requests, "an episode alone and one beside others"
            )

    @rule("Do not catch BaseException, or raise it again: a limit passes through the agent.")
    async def stops_at_its_limit(self) -> None:
        """At the limit of turns the episode ends."""
        endless = self._trial.changed(steps=ENDLESS)
        free = self._trial.episode(endless, max_turns=3)
        ending = await self._trial.ended(free)
        asked = sum(one.startswith("asks ") for one in free.requests.values())
        if asked < 2:
            raise NotChecked("it asks a policy only once in an episode")
        require(ending in ("turn_limit", "finished"), f"the episode ended as {ending!r}")
        limited = self._trial.episode(endless, max_turns=1)
        ending = await self._trial.ended(limited)
        require(
            ending == ("turn_limit" if limited.limits else "finished"),
            f"with one turn left it went on after the limit, and the episode ended as {ending!r}",
        )

    @rule("Do not catch BaseException, or raise it again: a failure passes through the agent.")
    async def passes_failures_on(self) -> None:
        """A failure of the environment ends the attempt."""
        episode = self._trial.episode(self._trial.changed(fails=True))
        ending = await self._trial.ended(episode)
        if all(one.startswith("asks ") for one in episode.requests.values()):
            raise NotChecked("it has no environment")
        assert episode.outcome is not None
        failure = episode.outcome.failure
        require(
            failure is not None and failure.code == FAILURE,
            f"the environment failed, and the episode ended as {ending!r}",
        )

    @rule("Let asyncio.CancelledError pass, and start no asyncio task that outlives it.")
    async def ends_when_cancelled(self) -> None:
        """It ends in time when its task is cancelled."""
        before = Leftovers()
        await require_in_time(self._cancelled, LATE_S, "it took")
        await before.require_none("after it was cancelled")

    async def _cancelled(self) -> float:
        """Returns how many seconds an episode goes on after its cancellation."""
        episode = self._trial.episode(self._trial.changed(silent=True))
        cancelled_at: list[float] = []
        loop = asyncio.get_running_loop()

        async def cancel(run: EpisodeRun) -> None:
            await episode.asked.wait()
            cancelled_at.append(loop.time())
            run.cancel("the kit cancels it")

        ending = await self._trial.ended(episode, cancel)
        require(ending == "cancelled", f"the episode ended as {ending!r}")
        return loop.time() - cancelled_at[0]

    @rule("Let asyncio.CancelledError pass, and start no asyncio task that outlives it.")
    async def ends_at_its_deadline(self) -> None:
        """It ends in time at its deadline."""
        before = Leftovers()
        await require_in_time(self._at_its_deadline, DEADLINE_S + LATE_S, "it took")
        await before.require_none("after its deadline")

    async def _at_its_deadline(self) -> float:
        """Returns how many seconds an episode takes that nobody answers."""
        silent = self._trial.changed(silent=True)
        episode = self._trial.episode(silent, deadline_s=DEADLINE_S)
        ending = await self._trial.ended(episode)
        require(ending == "deadline", f"the episode ended as {ending!r}")
        return episode.seconds

    @rule("Do not compute or wait in the agent: all episodes of a worker wait meanwhile.")
    async def blocks_no_loop(self) -> None:
        """It does not block the asyncio loop."""
        await self._trial.played()  # Imports may take long once.
        await require_free_loop(self._trial.played, self._trial.blocked_s)

    @rule(
        "Move the call into the environment or into a judge, so that its answer is recorded. If "
        "no request depends on it, give --connects."
    )
    async def stays_inside(self) -> None:
        """It connects to nothing and starts no program."""
        if self._trial.connects:
            raise NotChecked("it may connect (--connects)")
        await self._trial.played()  # Imports may start programs once.
        with outside_calls() as found:
            await self._trial.played()
        # A connection may be kept, so those of all episodes so far count.
        found = list(dict.fromkeys([*self._trial.connections, *found]))
        require(not found, f"it did this by itself: {'; '.join(found[:3])}")

    @rule("End what you start before the coroutine returns.")
    async def leaves_nothing(self) -> None:
        """After the episode no process and no asyncio task is left."""
        await self._trial.played()
        before = Leftovers()
        await self._trial.played()
        await before.require_none("after the episode")
