"""An agent that forgets `await`, or steps before it resets, learns which method and what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from headrace.services.agent.episode import Agent, Episode
from tests.unit.agent.test_episode_run import World, end


async def resets_without(episode: Episode) -> None:
    observation: Any = episode.reset()
    while not observation.done:
        await episode.generate(observation.text)


async def steps_without(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done:
        generation = await episode.generate(observation.text)
        episode.step(generation.text)


async def generates_without(episode: Episode) -> None:
    await episode.reset()
    generation: Any = episode.new_conversation().generate("a")
    await episode.step(generation.text)


async def ends_without(episode: Episode) -> None:
    await episode.reset()
    episode.score("judge", {})


async def steps_first(episode: Episode) -> None:
    await episode.step("A")


MISTAKES = [
    (resets_without, "episode.reset was called without await: write `await episode.reset(…)`"),
    (steps_without, "episode.step was called without await: write `await episode.step(…)`"),
    (generates_without, "conversation.generate was called without await"),
    (ends_without, "episode.score was called without await"),
    (steps_first, "episode.step was called before episode.reset"),
]


@pytest.mark.parametrize(("agent", "message"), MISTAKES)
def test_the_failure_names_the_method_and_the_remedy(agent: Agent, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcome = end(World(), agent=agent)
    assert outcome.ending == "failed"
    assert outcome.failure is not None
    assert outcome.failure.origin == "agent"
    assert message in outcome.failure.message


def test_requests_may_be_awaited_later_and_together() -> None:
    async def patient(episode: Episode) -> None:
        import asyncio

        coming = asyncio.create_task(episode.reset())
        await asyncio.wait_for(coming, 5)
        asking = episode.generate("a")
        other = episode.gather(lambda: episode.new_conversation().generate("b"))
        assert [(await asking).text, (await other)[0].text] == ["AB", "AB"]
        await episode.step("A")

    assert end(World(), agent=patient).ending == "finished"
