"""The agent: it decides what the policy reads, and what becomes of its answers."""

from __future__ import annotations

from headrace import Episode


async def solve(episode: Episode) -> None:
    """Lets the policy pay coin by coin until the environment ends the episode.

    Headrace may run this coroutine again with the recorded answers. So it keeps nothing outside of
    itself, and takes random numbers only from `episode.random`.
    """
    coins = 0
    observation = await episode.reset()
    while not observation.done:
        answer = await episode.generate(observation.text)
        observation = await episode.step(answer.text)
        coins += 1
    episode.metrics["coins"] = coins
