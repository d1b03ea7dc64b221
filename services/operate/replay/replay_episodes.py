"""Runs agents again against the answers that a run recorded. It writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.events import EpisodeStarted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    ACTIONS,
    EPISODES,
    GENERATIONS,
    OBSERVATIONS,
    OUTCOMES,
    PROMPTS,
    Topic,
)
from headrace.services.agent.agents import load_agents
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.operate.replay.recorded_answers import (
    Divergence,
    RecordedAttempt,
    replay_attempt,
)
from headrace.services.operate.replay.recording import (
    Recording,
    TaskRange,
    read_between,
    read_topic,
)

CHANGEABLE = ("agents",)
"""The keys of the recipe that a replay of episodes may change."""
EXCHANGES: tuple[Topic[Any], ...] = (PROMPTS, ACTIONS, GENERATIONS, OBSERVATIONS)
"""The topics with an agent's requests and their answers. They are kept for days."""

Key = tuple[int, int]
"""Task and sample."""
T = TypeVar("T")


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
    attempts, began = await _choose(recording, tasks, limit, replayed)
    await _read(recording.log, attempts, began)
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


async def _read(log: EventLog, attempts: Mapping[Key, RecordedAttempt], since: float) -> None:
    """Adds what the log has of these episodes, which started at `since` or later.

    An outcome names the attempt that counts, so outcomes come first. Of the other topics, which are
    large, only the time is read in which the episodes were played.
    """
    unfinished, until = set(attempts), since
    async with aclosing(read_between(log, OUTCOMES, since)) as outcomes:
        async for delivery in outcomes:
            key = delivery.event.task, delivery.event.sample
            if key in attempts:
                attempts[key].add(delivery.event)
                unfinished.discard(key)
                until = max(until, delivery.recorded_at)
            if not unfinished:
                break
    for topic in EXCHANGES:
        part = read_between(log, topic, since, None if unfinished else until)
        async with aclosing(part) as deliveries:
            async for exchange in deliveries:
                event = exchange.event
                if (attempt := attempts.get((event.task, event.sample))) is not None:
                    attempt.add(event)


async def _choose(
    recording: Recording, tasks: TaskRange, limit: int, replayed: EpisodesReplayed
) -> tuple[dict[Key, RecordedAttempt], float]:
    """Returns the first episodes of the range whose whole record is kept, and when they began.

    Only these are in memory, however many the log has: each holds its whole task.
    """
    since = await _kept_since(recording.log)
    found: set[Key] = set()
    chosen: dict[Key, Delivery[EpisodeStarted]] = {}
    async with aclosing(read_topic(recording.log, EPISODES)) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            key = event.task, event.sample
            if event.verdict is not None or event.task not in tasks or key in found:
                continue
            found.add(key)
            if delivery.recorded_at < since:
                replayed.no_longer_kept += 1
            else:
                chosen[key] = delivery
            if len(chosen) >= 2 * limit:
                chosen = _first(chosen, limit)
    if found and not chosen:
        raise RecordsLost(
            f"{recording.namespace} has {len(found)} episodes of tasks {tasks}, but their requests "
            "and answers are no longer kept"
        )
    if not found:
        raise UsageError(
            f"{recording.namespace} has no episode of tasks {tasks}. `headrace status` shows how "
            "many tasks there are"
        )
    chosen = _first(chosen, limit)
    replayed.beyond_limit = len(found) - replayed.no_longer_kept - len(chosen)
    began = min(one.recorded_at for one in chosen.values())
    return {key: RecordedAttempt(one.event) for key, one in chosen.items()}, began


def _first(chosen: Mapping[Key, T], limit: int) -> dict[Key, T]:
    return {key: chosen[key] for key in sorted(chosen)[:limit]}


async def _kept_since(log: EventLog) -> float:
    """Returns the epoch seconds from which on the record of an episode is complete.

    An episode's requests follow its start. So if it started after the oldest record of every
    partition that has lost records, then all of its records are kept.
    """
    topics = (EPISODES, *EXCHANGES)
    partitions = [one for topic in topics for one in log.topics.partitions_of(topic)]
    since = 0.0
    for partition, (first, _) in (await log.broker.ends(partitions)).items():
        if first > 0:
            since = max(since, await _oldest(log, partition))
    return since


async def _oldest(log: EventLog, partition: Partition) -> float:
    """Returns when the oldest record of a partition was written, in epoch seconds.

    If retention has removed all of them, they were older than it allows.
    """
    async with aclosing(read_events(log, {partition: WHOLE})) as deliveries:
        async for delivery in deliveries:
            return delivery.recorded_at
    settings = (await log.broker.topic_settings([partition.topic]))[partition.topic]
    kept_ms = int(settings.get("retention.ms", -1))
    return now() - max(0, kept_ms) / 1000
