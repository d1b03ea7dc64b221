"""Answers and ends that are read before the start of their episode, or after its end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.schemas.events import EnvironmentUse, EpisodeEnded, ObservationRecorded
from headrace.services.agent.memory.unread_answers import (
    AnswerReader,
    KeptAnswer,
    UnreadAnswer,
    observation_of,
    size_of,
)
from headrace.services.agent.requests import Answer, close_after
from headrace.services.log.event_log import Delivery
from headrace.services.worker.shard import ShardContext

KEPT_BYTES = 32 * 1024 * 1024
"""A shard keeps about so many bytes of answers to episodes that don't run yet. Of the answers that
come after these it keeps the place in the log."""
EARLY = 256
"""Largest number of episodes whose answers are kept before their start is read."""
START_S = 10.0
"""An episode is over if its start was not read this many seconds after an answer to it.

The start was written before the answer, but to another topic, so it may be read after it."""
ENDED = 1_024
"""How many ended tasks are known after the shard has caught up: those that ended last."""

Key = tuple[int, int]
"""A task's number, and a sample."""


@dataclass(eq=False, slots=True)
class _Kept:
    since_s: float
    """When the first of the answers was read."""
    answers: list[KeptAnswer] = field(default_factory=list)
    """In log order."""
    size: int = 0
    """Bytes of those that are in memory."""


class EarlyAnswers:
    """Answers that were read before their episode ran, by episode."""

    def __init__(self, reader: AnswerReader) -> None:
        """`reader` reads the answers of which only the place was kept."""
        self._reader = reader
        self._size = 0
        """Bytes of all answers that are in memory."""
        self._kept: dict[Key, _Kept] = {}
        self._last: dict[tuple[int, int, int, int], ObservationRecorded] = {}
        """The last answer of each environment of the episodes that are over."""

    def keep(self, key: Key, delivery: Delivery[Answer], now_s: float) -> None:
        """Keeps an answer, or its place in the log, until its episode takes it."""
        if key not in self._kept:
            self._kept[key] = _Kept(now_s)
        kept, size = self._kept[key], size_of(delivery.event)
        if self._size + size > KEPT_BYTES:
            kept.answers.append(UnreadAnswer.of(delivery, self._reader))
            return
        kept.answers.append(delivery.event)
        kept.size += size
        self._size += size

    def observed(self, key: Key) -> list[ObservationRecorded]:
        """Returns all answers of an episode's environments, in log order.

        Those that are not in memory have no contents.
        """
        kept = self._kept[key].answers if key in self._kept else ()
        return [one for answer in kept if (one := observation_of(answer)) is not None]

    def take(self, key: Key) -> dict[int, dict[str, KeptAnswer]]:
        """Removes and returns an episode's answers, by attempt and call: the first one of each."""
        answers: dict[int, dict[str, KeptAnswer]] = {}
        for answer in self._pop(key):
            answers.setdefault(answer.attempt, {}).setdefault(answer.call, answer)
        return answers

    def end(self, key: Key) -> None:
        """Drops the answers to an episode that is over, but for the last one of each environment.

        All that is kept of that one is what a `close` of its environment needs.
        """
        for kept in self._pop(key):
            if (answer := observation_of(kept)) is not None:
                which = answer.task, answer.sample, answer.attempt, answer.partition
                if which not in self._last or answer.index >= self._last[which].index:
                    self._last[which] = _without_contents(answer)

    def drop_over(
        self, has_ended: Callable[[int, int], bool], now_s: float
    ) -> list[ObservationRecorded]:
        """Drops the answers to episodes that are over, and all but the EARLY newest of the others.

        Over are those that have ended, and those that did not start within START_S. Returns the
        last answer of each of their environments. It has no contents.
        """
        for key, kept in list(self._kept.items()):
            if now_s - kept.since_s >= START_S or has_ended(*key):
                self.end(key)
        for key in list(self._kept)[:-EARLY]:
            self._pop(key)
        last, self._last = self._last, {}
        return list(last.values())

    def __bool__(self) -> bool:
        """Whether there are answers to episodes that may still start."""
        return bool(self._kept)

    def _pop(self, key: Key) -> list[KeptAnswer]:
        kept = self._kept.pop(key, None)
        if kept is None:
            return []
        self._size -= kept.size
        return kept.answers


class EnvironmentCloser:
    """Ends the environments that answered to episodes that are over.

    They answer requests of a former owner, which the worker that ended the episode did not see, or
    which came after its `close`. Nothing else would free their slots before the deadline.
    """

    def __init__(
        self,
        context: ShardContext,
        answers: EarlyAnswers,
        has_ended: Callable[[int, int], bool],
        environment_of: Callable[[int], EnvironmentUse | None],
    ) -> None:
        """`has_ended` tells whether an episode has. `environment_of` returns the environment of a
        task that is known."""
        self._context = context
        self._answers = answers
        self._has_ended = has_ended
        self._environment_of = environment_of
        self._waits = False

    def close_over(self) -> asyncio.Task[None] | None:
        """Ends the environments of episodes that have ended, or did not start within START_S.

        It looks again after START_S as long as there may be more. Returns the task that closes.
        """
        over = self._answers.drop_over(self._has_ended, asyncio.get_running_loop().time())
        closing = self.close(over) if over else None
        if self._answers and not self._waits:
            self._waits = True
            # Held now: once the record at hand is handled, the positions are behind it.
            looking = self._look_again(self._context.hold_positions())
            self._context.spawn(looking, "close environments later")
        return closing

    def close(self, last: Sequence[ObservationRecorded]) -> asyncio.Task[None]:
        """Ends the environments that gave these answers.

        If this worker ends first, the partition's next owner reads the answers again, and closes
        the environments.
        """
        closed = self._context.hold_positions()

        async def close() -> None:
            own = self._context.partition.number
            for answer in last:
                partition = answer.partition if answer.partition >= 0 else own
                request = close_after(answer, self._environment_of(answer.task))
                await self._context.send(request, partition)
            closed()

        return self._context.spawn(close(), "close environments")

    async def _look_again(self, held: Callable[[], None]) -> None:
        """No record may come that has the shard look: it may have been the last one.

        `held` holds the positions. What is kept at a look is over at the next one. Until then the
        hold of the look before covers its records.
        """
        before: Callable[[], None] | None = None
        while True:
            await asyncio.sleep(START_S)
            if (closing := self.close_over()) is not None:
                await closing
            if before is not None:
                before()
            if not self._answers:
                break
            before, held = held, self._context.hold_positions()
        held()
        self._waits = False


class EarlyEnds:
    """Outcomes that were read before the start of their task, and the tasks that have ended."""

    def __init__(self) -> None:
        self._outcomes: dict[int, dict[int, EpisodeEnded]] = {}
        """By task and sample: the first one of each. A task that has ended has none here."""
        self._tasks: OrderedDict[int, None] = OrderedDict()
        """Those that ended, in log order."""

    def add_outcome(self, outcome: EpisodeEnded) -> None:
        """Keeps the outcome of an episode, unless its task has ended."""
        if outcome.task not in self._tasks:
            self._outcomes.setdefault(outcome.task, {}).setdefault(outcome.sample, outcome)

    def add_result(self, number: int) -> None:
        """Notes that a task has ended."""
        self._tasks[number] = None
        self._outcomes.pop(number, None)

    def take_outcomes(self, number: int) -> dict[int, EpisodeEnded]:
        """Removes and returns a task's outcomes, by sample."""
        return self._outcomes.pop(number, {})

    def has_ended(self, number: int, sample: int | None = None) -> bool:
        """Whether a task has ended; with `sample`, whether that episode has."""
        return number in self._tasks or sample in self._outcomes.get(number, ())

    def trim(self) -> None:
        """Forgets all outcomes, and all but the ENDED tasks that ended last."""
        self._outcomes.clear()
        while len(self._tasks) > ENDED:
            self._tasks.popitem(last=False)


def _without_contents(answer: ObservationRecorded) -> ObservationRecorded:
    """Returns an answer with what names its environment and its place in the attempt alone."""
    return ObservationRecorded(
        task=answer.task,
        sample=answer.sample,
        attempt=answer.attempt,
        call=answer.call,
        index=answer.index,
        digest=answer.digest,
        partition=answer.partition,
    )
