"""Which turn a step's reward belongs to, if branches of an agent ask at the same time."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from math import fsum
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.events import (
    ActionRequested,
    Event,
    GenerationCompleted,
    ObservationRecorded,
    Ref,
    TrajectoryRecorded,
)
from headrace.services.agent.episode import Agent, Episode
from tests.unit.agent.test_episode_run import World, play, task

LARGE = task(max_turns=1000, max_tokens=10_000)


class Shuffled(World):
    """Answers what is asked at the same time in an order of chance. Each step earns something."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = Random(seed)
        self.held: list[GenerationCompleted | ObservationRecorded] = []
        self.earned: dict[str, float] = {}
        self.observed = self.earn

    async def send(self, event: Event) -> Ref:
        answer = self.answer(event)
        if answer is not None:
            self.held.append(answer)
            asyncio.get_running_loop().call_soon(self.release)
        self.sent.append(event)
        return Ref(topic="t", partition=0, offset=len(self.sent), digest=bytes(16))

    def release(self) -> None:
        assert self.run is not None
        self.run.on_answer(self.held.pop(self.random.randrange(len(self.held))))

    def earn(self, event: ActionRequested) -> dict[str, Any]:
        if event.kind == "reset":
            return {"reward": None}
        reward = self.earned[event.call] = sum(map(int, event.call.split("."))) / 10
        return {"reward": reward}


def by_call(trajectory: TrajectoryRecorded) -> dict[str, float | None]:
    return {turn.call: turn.reward for turn in trajectory.turns}


async def solve(episode: Episode) -> None:
    await episode.new_conversation().generate("solve")


async def steps_after_a_gather(episode: Episode) -> None:
    await episode.reset()
    await episode.generate("plan")
    await episode.gather(lambda: solve(episode), lambda: solve(episode))
    await episode.step("the better one")


async def steps_in_a_gather(episode: Episode) -> None:
    await episode.reset()
    await episode.generate("call two tools")
    await episode.gather(lambda: episode.step("a"), lambda: episode.step("b"))
    await episode.generate("go on")


async def steps_after_a_failed_gather(episode: Episode) -> None:
    async def fails() -> None:
        await solve(episode)
        raise ValueError("no solution")

    await episode.reset()
    await episode.generate("plan")
    with pytest.raises(ValueError, match="no solution"):
        await episode.gather(lambda: asyncio.sleep(60), fails, lambda: asyncio.sleep(60))
    await episode.step("give up")


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (steps_after_a_gather, {"2": None, "3.1.1": None, "3.2.1": 1.0}),
        (steps_in_a_gather, {"2": 2.0, "4": None}),
        (steps_after_a_failed_gather, {"2": None, "3.2.1": 1.0}),
    ],
)
def test_a_reward_belongs_to_the_newest_turn_before_it(
    agent: Agent, expected: dict[str, float | None]
) -> None:
    world = World()
    world.observed = lambda event: {"reward": None if event.kind == "reset" else 1.0}
    assert by_call(play(world, task(), agent)[1]) == expected


Plan = list[Any]
"""What a branch asks for: a turn, a step, or a gather of such plans."""
PLANS = st.recursive(
    st.lists(st.sampled_from(["turn", "step"]), max_size=4),
    lambda plans: st.lists(
        st.one_of(st.sampled_from(["turn", "step"]), st.lists(plans, max_size=3)), max_size=4
    ),
    max_leaves=8,
)


def following(plan: Plan) -> Agent:
    async def follow(episode: Episode, plan: Plan) -> None:
        for one in plan:
            if one == "turn":
                await episode.new_conversation().generate("?")
            elif one == "step":
                await episode.step("!")
            else:
                await episode.gather(*(lambda of=of: follow(episode, of) for of in one))

    async def agent(episode: Episode) -> None:
        await episode.reset()
        await episode.new_conversation().generate("?")
        await follow(episode, plan)

    return agent


def path(call: str) -> list[int]:
    return [int(part) for part in call.split(".")]


def precedes(turn: str, step: str) -> bool:
    """Whether a turn had ended when a step was asked for: numbers of calls and branches alternate
    in a path, and branches next to one another have no order."""
    pairs = list(zip(path(turn), path(step), strict=False))
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return same % 2 == 0 and pairs[same][0] < pairs[same][1]


@given(PLANS, st.integers(0, 3))
def test_rewards_do_not_depend_on_which_branch_is_answered_first(plan: Plan, seed: int) -> None:
    world = Shuffled(seed)
    found = by_call(play(world, LARGE, following(plan))[1])
    followed: dict[str, list[float]] = {}
    for step, reward in world.earned.items():
        newest = max((turn for turn in found if precedes(turn, step)), key=path)
        followed.setdefault(newest, []).append(reward)
    assert found == {turn: fsum(followed[turn]) if turn in followed else None for turn in found}


@pytest.mark.parametrize("known", range(12))
def test_a_resumed_episode_has_the_same_rewards(known: int) -> None:
    """With the answers to the first requests of another worker, in whatever order they came."""
    plan = ["step", [["step", "turn", "step"], [[["turn"], ["step"]]], ["step"]], "step"]
    first, heir = Shuffled(1), Shuffled(2)
    _, whole = play(first, LARGE, following(plan))
    answers = {one.call: first.answer(one) for one in first.requests()[:known]}
    _, resumed = play(heir, LARGE, following(plan), answers={0: answers})
    assert by_call(resumed) == by_call(whole)
    assert by_call(whole).keys() == {"2", "4.1.2", "4.2.1.1.1"}
