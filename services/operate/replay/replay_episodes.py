"""Runs agents again against the answers that a run recorded. Reads only: no namespace is made."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import ACTIONS, EPISODES, GENERATIONS, OBSERVATIONS, OUTCOMES, PROMPTS
from headrace.services.agent.agents import load_agents
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.event_reader import read_all
from headrace.services.operate.replay.recorded_answers import (
    Divergence,
    RecordedAttempt,
    replay_attempt,
)
from headrace.services.operate.replay.recording import (
    Progress,
    Recording,
    partitions_of,
    read_topic,
)

CHANGEABLE = ("agents",)
"""What this replay does anew."""
TOPICS = (EPISODES, PROMPTS, GENERATIONS, ACTIONS, OBSERVATIONS)
"""What an agent asked and was told: kept for days."""

Key = tuple[int, int]
"""Task, sample."""


@dataclass
class _Record:
    """What the log has of one episode: the first of each id counts."""

    started: EpisodeStarted
    requests: dict[tuple[int, str], GenerationRequested | ActionRequested] = field(
        default_factory=dict
    )
    answers: dict[tuple[int, str], GenerationCompleted | ObservationRecorded] = field(
        default_factory=dict
    )
    outcome: EpisodeEnded | None = None

    def add(self, event: Event) -> None:
        """Takes a request, an answer or the outcome in."""
        if isinstance(event, EpisodeEnded):
            self.outcome = self.outcome or event
        elif isinstance(event, GenerationCompleted | ObservationRecorded):
            self.answers.setdefault((event.attempt, event.call), event)
        elif isinstance(event, GenerationRequested) or (
            isinstance(event, ActionRequested) and event.kind != "close"
        ):
            self.requests.setdefault((event.attempt, event.call), event)

    def attempt(self) -> RecordedAttempt:
        """The attempt that counts, or else the last one."""
        seen = [number for number, _ in (*self.requests, *self.answers)]
        number = max(seen, default=0) if self.outcome is None else self.outcome.attempt
        return RecordedAttempt(
            self.started,
            number,
            {call: one for (attempt, call), one in self.requests.items() if attempt == number},
            {call: one for (attempt, call), one in self.answers.items() if attempt == number},
            self.outcome,
        )


@dataclass(frozen=True)
class EpisodeDivergence:
    """Where an episode's agent does otherwise."""

    task: int
    sample: int
    attempt: int
    divergence: Divergence

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "task": self.task,
            "sample": self.sample,
            "attempt": self.attempt,
            **asdict(self.divergence),
        }


@dataclass
class EpisodesReplayed:
    """A replay of agents."""

    episodes: int = 0
    unfinished: int = 0
    """Of them, those that the record leaves before their end."""
    past: int = 0
    """Episodes left out, since part of their record is no longer kept."""
    more: int = 0
    """Episodes left out by the limit."""
    divergences: list[EpisodeDivergence] = field(default_factory=list)

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "episodes": self.episodes,
            "unfinished": self.unfinished,
            "no_longer_kept": self.past,
            "beyond_limit": self.more,
            "divergences": [one.to_tree() for one in self.divergences],
        }


async def replay_episodes(
    recording: Recording,
    recipe: Recipe,
    *,
    tasks: tuple[int, int | None],
    limit: int,
    progress: Progress,
) -> EpisodesReplayed:
    """Runs the agents of `recipe` over the episodes of a range of tasks, at most `limit`.

    The range has both ends; None is the last task. Episodes are held in memory, up to the limit.
    """
    setups = load_agents(recipe)
    replayed = EpisodesReplayed()
    records = await _choose(recording, tasks, limit, replayed)
    for topic in (PROMPTS, ACTIONS, GENERATIONS, OBSERVATIONS, OUTCOMES):
        async with aclosing(read_topic(recording.log, topic)) as deliveries:
            async for delivery in deliveries:
                event: Any = delivery.event
                if (record := records.get((event.task, event.sample))) is not None:
                    record.add(event)
    for (task, sample), record in sorted(records.items()):
        attempt = record.attempt()
        agent = attempt.started.submitted.agent
        if agent not in setups:
            raise UsageError(f"task {task} names agent {agent!r}, which the recipe lacks")
        if not setups[agent].replayable:
            raise UsageError(f"task {task} was played by {agent!r}, which can't be run again")
        divergence = await replay_attempt(attempt, setups[agent])
        replayed.episodes += 1
        replayed.unfinished += record.outcome is None
        if divergence is not None:
            replayed.divergences.append(
                EpisodeDivergence(task, sample, attempt.attempt, divergence)
            )
        progress("episodes replayed", replayed.episodes, len(records))
    return replayed


async def _choose(
    recording: Recording, tasks: tuple[int, int | None], limit: int, replayed: EpisodesReplayed
) -> dict[Key, _Record]:
    """The first episodes of the range whose whole record is kept."""
    first, last = tasks
    since = await _kept_since(recording.log)
    found: dict[Key, Delivery[EpisodeStarted]] = {}
    async with aclosing(read_topic(recording.log, EPISODES)) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if not isinstance(event, EpisodeStarted) or event.verdict is not None:
                continue
            if first <= event.task and (last is None or event.task <= last):
                found.setdefault((event.task, event.sample), delivery)  # type: ignore[arg-type]
    whole = {key: one for key, one in found.items() if one.recorded_at >= since}
    replayed.past = len(found) - len(whole)
    if not whole:
        span = f"{first} to {'the last' if last is None else last}"
        if found:
            raise RecordsLost(
                f"of the {replayed.past} episodes of tasks {span} in {recording.namespace}, "
                "requests and answers are no longer kept"
            )
        raise UsageError(f"{recording.namespace} has no episode of tasks {span}")
    chosen = sorted(whole)[:limit]
    replayed.more = len(whole) - len(chosen)
    return {key: _Record(whole[key].event) for key in chosen}


async def _kept_since(log: EventLog) -> float:
    """Epoch seconds from which on nothing is missing: what an episode asks follows its start."""
    places = [place for topic in TOPICS for place in partitions_of(log.topics, topic)]
    bounds = await log.broker.ends(places)
    since = 0.0
    for place, (first, end) in bounds.items():
        if not 0 < first < end:
            continue
        async with aclosing(read_all(log, {place: "first"})) as deliveries:
            async for delivery in deliveries:
                since = max(since, delivery.recorded_at)
                break
    return since
