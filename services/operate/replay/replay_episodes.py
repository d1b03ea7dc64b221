"""Runs agents again against the answers that a run recorded. It writes nothing."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.events import EpisodeStarted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ACTIONS, EPISODES, GENERATIONS, OBSERVATIONS, OUTCOMES, PROMPTS
from headrace.services.agent.agents import load_agents
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.operate.replay.recorded_answers import (
    Divergence,
    RecordedAttempt,
    replay_attempt,
)
from headrace.services.operate.replay.recording import Recording, TaskRange, read_topic

CHANGEABLE = ("agents",)
"""The keys of the recipe that a replay of episodes may change."""
EXCHANGES = (PROMPTS, ACTIONS, GENERATIONS, OBSERVATIONS)
"""The topics with an agent's requests and their answers. They are kept for days."""

Key = tuple[int, int]
"""Task and sample."""


@dataclass
class EpisodesReplayed:
    """The result of a replay of episodes."""

    episodes: int = 0
    unfinished: int = 0
    """How many of them have no outcome in the log."""
    no_longer_kept: int = 0
    """Episodes left out because part of their record is no longer kept."""
    beyond_limit: int = 0
    """Episodes left out because of the limit."""
    divergences: list[Divergence] = field(default_factory=list)


async def replay_episodes(
    recording: Recording, recipe: Recipe, *, tasks: TaskRange, limit: int
) -> EpisodesReplayed:
    """Runs the agents of `recipe` over at most `limit` recorded episodes of these tasks.

    It keeps the episodes' records in memory. Raises UsageError if there is no such episode or if
    the recipe lacks its agent, and RecordsLost if retention has removed all of the records.
    """
    setups = load_agents(recipe)
    replayed = EpisodesReplayed()
    attempts = await _choose(recording, tasks, limit, replayed)
    for topic in (OUTCOMES, *EXCHANGES):  # An outcome names the attempt that counts.
        async with aclosing(read_topic(recording.log, topic)) as deliveries:
            async for delivery in deliveries:
                event = delivery.event
                if (attempt := attempts.get((event.task, event.sample))) is not None:
                    attempt.add(event)
    for (task, _), attempt in sorted(attempts.items()):
        agent = attempt.started.submitted.agent
        if agent not in setups:
            raise UsageError(
                f"task {task} names agent {agent!r}, which the recipe lacks: add agents.{agent}, "
                "or leave the task out with --tasks"
            )
        if not setups[agent].replayable:
            raise UsageError(
                f"task {task} was run by agent {agent!r}, which is not replayable: leave the task "
                "out with --tasks"
            )
        divergence = await replay_attempt(attempt, setups[agent])
        replayed.episodes += 1
        replayed.unfinished += attempt.outcome is None
        if divergence is not None:
            replayed.divergences.append(divergence)
        recording.progress("episodes replayed", replayed.episodes, len(attempts))
    return replayed


async def _choose(
    recording: Recording, tasks: TaskRange, limit: int, replayed: EpisodesReplayed
) -> dict[Key, RecordedAttempt]:
    """Returns the first episodes of the range whose whole record is kept."""
    since = await _kept_since(recording.log)
    found: dict[Key, Delivery[EpisodeStarted]] = {}
    async with aclosing(read_topic(recording.log, EPISODES)) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if event.verdict is None and event.task in tasks:
                found.setdefault((event.task, event.sample), delivery)
    whole = {key: one for key, one in found.items() if one.recorded_at >= since}
    replayed.no_longer_kept = len(found) - len(whole)
    if found and not whole:
        raise RecordsLost(
            f"{recording.namespace} has {len(found)} episodes of tasks {tasks}, but their requests "
            "and answers are no longer kept"
        )
    if not found:
        raise UsageError(
            f"{recording.namespace} has no episode of tasks {tasks}. `headrace status` shows how "
            "many tasks there are"
        )
    chosen = sorted(whole)[:limit]
    replayed.beyond_limit = len(whole) - len(chosen)
    return {key: RecordedAttempt(whole[key].event) for key in chosen}


async def _kept_since(log: EventLog) -> float:
    """Returns the epoch seconds from which on the record of an episode is complete.

    An episode's requests follow its start. So if it started after the oldest record of every
    partition that has lost records, then all of its records are kept.
    """
    topics = (EPISODES, *EXCHANGES)
    partitions = [one for topic in topics for one in log.topics.partitions_of(topic)]
    since = 0.0
    for partition, (first, end) in (await log.broker.ends(partitions)).items():
        if not 0 < first < end:
            continue
        async with aclosing(read_events(log, {partition: WHOLE})) as deliveries:
            async for delivery in deliveries:
                since = max(since, delivery.recorded_at)
                break
    return since
