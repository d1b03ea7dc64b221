"""The agent of the benchmarks: as `multi_turn`, with a watch in its hand."""

from __future__ import annotations

from time import perf_counter

from headrace.services.agent.episode import Episode


async def timed(episode: Episode) -> None:
    """Notes the milliseconds of every turn: a generation and a step, so four hops over the log.

    What it measures goes into the trajectory's metrics only, so it replays all the same.
    """
    observation = await episode.reset()
    turn = 0
    while not observation.done:
        began = perf_counter()
        generation = await episode.generate(observation.text)
        middle = perf_counter()
        observation = await episode.step(generation.text)
        ended = perf_counter()
        episode.metrics[f"turn_{turn}"] = (ended - began) * 1000
        episode.metrics[f"generate_{turn}"] = (middle - began) * 1000
        turn += 1
