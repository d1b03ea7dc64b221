"""Reads the episodes that count from the log, with their texts and the times of their requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.errors import RecordsLost
from headrace.schemas.events import (
    Event,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Ref,
    TaskEnded,
    TrajectoryRecorded,
    Turn,
)
from headrace.schemas.topics import GENERATIONS, OBSERVATIONS, PROMPTS, RESULTS
from headrace.schemas.turn_paths import paths
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.kept_records import KeptRecords
from headrace.services.log.log_reader import WHOLE, OffsetRange, read_events
from headrace.services.log.unpacked import Texts, floats_in, ids_in, versions_in

FETCHED_AT_ONCE = 64
UNREAD = "whose trajectory is gone or can't be decoded"
"""Why an episode is left out by a reader, for people."""
SKEW_S = 60.0
"""The clocks of two writers may differ by this many seconds."""
_Attempt = tuple[int, int, int]
"""Task, sample, attempt."""
Prompts = Mapping[tuple[int, int, int, str], tuple[str, str]]
"""Text and chat of each prompt, by task, sample, attempt and call."""
_Answers = dict[tuple[str, str], "TimedAnswer"]
"""By the name of the event and the call."""


@dataclass(frozen=True, slots=True)
class UnpackedTurn:
    """A turn with its tokens unpacked. C tokens were added to the context, T were sampled."""

    turn: Turn
    context: list[int]
    """[C] token ids."""
    tokens: list[int]
    """[T] token ids."""
    logprobs: list[float]
    """[T], or [0] for a demonstration."""
    versions: list[int]
    """The distinct versions that sampled a token, ascending."""
    context_text: str
    """Empty if this machine does not have the tokenizer."""
    text: str
    prompt_tokens: int
    """How many tokens came before the sampled ones, on the path of this turn."""

    @property
    def model(self) -> str:
        """The policy with the newest version that sampled a token, such as `default@7`."""
        policy = self.turn.policy
        return f"{policy}@{self.versions[-1]}" if self.versions else policy


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """An answer of an inference or an env worker to a request of the attempt."""

    event: GenerationCompleted | ObservationRecorded
    ended_at: float
    """When the log recorded it, in seconds since the epoch."""

    @property
    def began_at(self) -> float:
        """When the work began, without the time in a queue, in seconds since the epoch."""
        return self.ended_at - self.event.run_ms / 1000


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """One episode as recorded."""

    namespace: str
    recorded: TrajectoryRecorded
    turns: tuple[UnpackedTurn, ...]
    answers: tuple[TimedAnswer, ...]
    """Those of the attempt that counts, in the order of the log. Empty unless they were read."""

    @property
    def name(self) -> str:
        """Names it in all exports: `NAMESPACE/TASK/SAMPLE`."""
        return f"{self.namespace}/{self.recorded.task}/{self.recorded.sample}"

    def paths(self) -> list[list[int]]:
        """Returns the indices of the turns of each path from a first turn to a leaf."""
        return [list(path) for path in paths(self.recorded.turns)]


class EpisodeReader:
    """Reads the episodes of a run, one partition after the other."""

    def __init__(
        self, log: EventLog, texts: Texts, *, with_answers: bool, with_prompts: bool = False
    ) -> None:
        """`with_answers` also reads the answers to the attempts' requests, and `with_prompts` what
        the agents asked policies."""
        self.prompts: Prompts = {}
        """Those of the newest episodes, the one that was yielded last among them."""
        self.unread = 0
        """Episodes that were left out, because their trajectory is gone or can't be decoded."""
        self._log = log
        self._kept = KeptRecords(log.broker)
        self._texts = texts
        self._with_answers = with_answers
        self._with_prompts = with_prompts

    async def read(
        self, tasks: Collection[int], most: int
    ) -> AsyncGenerator[RecordedEpisode, None]:
        """Yields the episodes of some tasks, or of all if `tasks` is empty; at most `most`.

        An episode that was refused or failed early has no trajectory, and is left out. So is one
        whose trajectory can't be read any more. Raises RecordsLost if that leaves none.
        """
        left = most
        for number in range(self._log.topics.partitions):
            refs = (await self._refs(number, tasks))[:left] if left else []
            for first in range(0, len(refs), FETCHED_AT_ONCE):
                found = await self._trajectories(refs[first : first + FETCHED_AT_ONCE])
                left -= len(found)
                answers = await self._answers(number, found) if self._with_answers else {}
                if self._with_prompts:
                    self.prompts = await self._prompts(found)
                for event in found:
                    yield self._episode(event, answers.get(_attempt(event), []))
        require_episodes(most - left, self.unread)

    async def _refs(self, number: int, tasks: Collection[int]) -> list[Ref]:
        """The trajectories that count in a partition, and are kept."""
        refs: list[Ref] = []
        async with aclosing(counted_results(self._log, number, tasks)) as results:
            async for ended, _ in results:
                refs += [one.trajectory for one in ended.outcomes if one.trajectory is not None]
        kept = await self._kept.kept(refs)
        self.unread += len(refs) - len(kept)
        return kept

    async def _trajectories(self, refs: Sequence[Ref]) -> list[TrajectoryRecorded]:
        """Fetches those of the trajectories that can be read, and counts the others."""
        found: list[TrajectoryRecorded] = []
        async with aclosing(self._log.fetch_each(refs)) as events:
            async for event in events:
                if isinstance(event, TrajectoryRecorded):
                    found.append(event)
        self.unread += len(refs) - len(found)
        return found

    async def _prompts(self, events: Collection[TrajectoryRecorded]) -> Prompts:
        """The prompts of some attempts. Agents choose their partitions, so all are read."""
        attempts, found = {_attempt(event) for event in events}, dict[Any, tuple[str, str]]()
        ranges = await self._played(self._log.topics.partitions_of(PROMPTS), events)
        async with aclosing(read_events(self._log, ranges)) as deliveries:
            async for delivery in deliveries:
                event = delivery.event
                if not isinstance(event, GenerationRequested) or event.kind != "generate":
                    continue
                if (attempt := _attempt(event)) in attempts:
                    found.setdefault((*attempt, event.call), (event.text, event.chat))
        return found

    async def _answers(
        self, number: int, events: Collection[TrajectoryRecorded]
    ) -> dict[_Attempt, list[TimedAnswer]]:
        """The answers of some attempts by attempt. The first record of an answer counts.

        It reads only the time in which they were played.
        """
        found: dict[_Attempt, _Answers] = {_attempt(event): {} for event in events}
        topics = (GENERATIONS, OBSERVATIONS)
        partitions = [self._log.topics.partition(one, number=number) for one in topics]
        ranges = await self._played(partitions, events)
        async with aclosing(read_events(self._log, ranges)) as deliveries:
            async for delivery in deliveries:
                _add_answer(found, delivery)
        return {
            attempt: sorted(answers.values(), key=lambda one: one.ended_at)
            for attempt, answers in found.items()
        }

    async def _played(
        self, partitions: Sequence[Partition], events: Collection[TrajectoryRecorded]
    ) -> dict[Partition, OffsetRange]:
        """The offsets of the time in which some attempts were played, by partition.

        To read whole partitions for every few episodes would take the square of their number.
        """
        if not events:
            return {}
        since = min(event.started for event in events) / 1000 - SKEW_S
        until = max(event.ended for event in events) / 1000 + SKEW_S
        starts, ends = [await self._log.broker.offsets_at(partitions, at) for at in (since, until)]
        return {one: (starts[one], ends[one]) for one in partitions}

    def _episode(self, event: TrajectoryRecorded, answers: list[TimedAnswer]) -> RecordedEpisode:
        turns: list[UnpackedTurn] = []
        for turn in event.turns:
            context, tokens = ids_in(turn.context), ids_in(turn.tokens)
            before = 0
            if 0 <= turn.parent < len(turns):
                parent = turns[turn.parent]
                before = parent.prompt_tokens + len(parent.tokens)
            text = self._texts.of(turn.policy, turn.tokens, event.tokenizer)
            turns.append(
                UnpackedTurn(
                    turn=turn,
                    context=context,
                    tokens=tokens,
                    logprobs=floats_in(turn.logprobs),
                    versions=versions_in(turn.versions),
                    context_text=self._texts.of(turn.policy, turn.context, event.tokenizer) or "",
                    text=turn.text if text is None else text,
                    prompt_tokens=before + len(context),
                )
            )
        return RecordedEpisode(self._log.topics.namespace, event, tuple(turns), tuple(answers))


async def counted_results(
    log: EventLog, number: int, tasks: Collection[int]
) -> AsyncGenerator[tuple[TaskEnded, float], None]:
    """Yields the results of some tasks, or of all if `tasks` is empty, in partition `number`.

    Beside each it yields when that was recorded, in epoch seconds. The first result of a task
    counts, and further ones are left out.
    """
    seen: set[int] = set()
    partition = log.topics.partition(RESULTS, number=number)
    async with aclosing(read_events(log, {partition: WHOLE})) as deliveries:
        async for delivery in deliveries:
            ended = delivery.event
            if not isinstance(ended, TaskEnded) or ended.task in seen:
                continue
            seen.add(ended.task)
            if not tasks or ended.task in tasks:
                yield ended, delivery.recorded_at


def require_episodes(found: int, unread: int) -> None:
    """Raises RecordsLost if no episode was found, but some were whose trajectory is unreadable."""
    if unread and not found:
        raise RecordsLost(
            f"the trajectories of all {unread:,} episodes are gone from the log or can't be "
            "decoded, so there is nothing to read. Name tasks that ended later"
        )


def left_unread(unread: int) -> str:
    """Says how many episodes were left out by a reader; empty if none was."""
    return f"{unread:,} {UNREAD}" if unread else ""


def _attempt(
    event: TrajectoryRecorded | GenerationRequested | GenerationCompleted | ObservationRecorded,
) -> _Attempt:
    return event.task, event.sample, event.attempt


def _add_answer(
    found: dict[_Attempt, _Answers],
    delivery: Delivery[Event],
) -> None:
    event = delivery.event
    if isinstance(event, GenerationCompleted | ObservationRecorded):
        answers = found.get(_attempt(event))
        if answers is not None:
            kind = type(event).__name__
            answers.setdefault((kind, event.call), TimedAnswer(event, delivery.recorded_at))
