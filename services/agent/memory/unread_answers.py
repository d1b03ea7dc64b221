"""Answers of which a successor keeps only the place in the log, and reads them when agents ask.

A worker that takes over reads all answers to its open episodes before it runs one of them. Kept in
memory, the answers of 10,000 long episodes take gigabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from sys import getsizeof, intern
from typing import cast

from headrace.schemas.events import ObservationRecorded
from headrace.services.agent.requests import Answer
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import Delivery, EventLog

READ_AT_ONCE = 256
"""Most answers that are read from the log together."""
READ_BYTES = 8 * 1024 * 1024
"""Answers that are read together have about so many bytes, or are one."""


@dataclass(frozen=True, slots=True, eq=False)
class UnreadAnswer:
    """An answer that is in the log, but not in memory."""

    task: int
    sample: int
    attempt: int
    call: str
    index: int
    """Of the action that it answers. -1 if it answers a prompt."""
    digest: bytes
    partition: int
    instance: str
    place: Partition
    offset: int
    recorded_at: float
    size: int
    """As `size_of` says."""
    reader: AnswerReader

    @classmethod
    def of(cls, delivery: Delivery[Answer], reader: AnswerReader) -> UnreadAnswer:
        """Returns what is kept of an answer."""
        answer = delivery.event
        observed = answer if isinstance(answer, ObservationRecorded) else None
        return cls(
            answer.task,
            answer.sample,
            answer.attempt,
            intern(answer.call),
            -1 if observed is None else observed.index,
            answer.digest,
            -1 if observed is None else observed.partition,
            "" if observed is None else intern(observed.instance),
            delivery.partition,
            delivery.offset,
            delivery.recorded_at,
            size_of(answer),
            reader,
        )

    async def read(self) -> Answer:
        """Returns the answer, from the log. While the log can't be read, it waits."""
        return await self.reader.read(self)

    def brief(self) -> ObservationRecorded | None:
        """Returns the answer of an environment without its contents. None: it is a generation."""
        if self.index < 0:
            return None
        return ObservationRecorded(
            task=self.task,
            sample=self.sample,
            attempt=self.attempt,
            call=self.call,
            index=self.index,
            digest=self.digest,
            partition=self.partition,
            instance=self.instance,
        )


KeptAnswer = Answer | UnreadAnswer
"""A recorded answer that an agent has not asked for yet."""


class AnswerReader:
    """Reads answers again for all shards of a worker: those first that were recorded first.

    The agents that take over ask for their answers one after the other. As the earliest answer that
    one waits for is read first, all of them together read the log about once, from its oldest
    answer to its newest.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._wanted: list[tuple[float, int, UnreadAnswer, asyncio.Future[Answer]]] = []
        """A heap, by the time of the record."""
        self._numbers = count()
        self._asked = asyncio.Event()

    async def read(self, unread: UnreadAnswer) -> Answer:
        """Returns an answer, once `run` has read it."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        heappush(self._wanted, (unread.recorded_at, next(self._numbers), unread, future))
        self._asked.set()
        return await future

    async def run(self) -> None:
        """Reads what is asked for until it is cancelled.

        Raises DependencyError if the log does not answer, and RecordsLost if an answer was deleted.
        """
        while True:
            await self._asked.wait()
            self._asked.clear()
            while some := self._next():
                positions = [Position(unread.place, unread.offset) for unread, _ in some]
                for record in await self._log.broker.fetch(positions):
                    delivery = await self._log.decode(record)
                    _, future = some.pop(0)
                    if not future.done():
                        future.set_result(cast("Answer", delivery.event))
                # Agents that have their answers ask for the next ones before more is read.
                await asyncio.sleep(0)

    def _next(self) -> list[tuple[UnreadAnswer, asyncio.Future[Answer]]]:
        """Takes away those that are read next. Nobody waits any more for some."""
        some: list[tuple[UnreadAnswer, asyncio.Future[Answer]]] = []
        size = 0
        while self._wanted and len(some) < READ_AT_ONCE and size < READ_BYTES:
            *_, unread, future = heappop(self._wanted)
            if not future.done():
                some.append((unread, future))
                size += unread.size
        return some


def size_of(answer: Answer) -> int:
    """Returns about how many bytes an answer takes in memory."""
    return getsizeof(answer) + sum(map(getsizeof, answer.__dict__.values()))


def observation_of(answer: KeptAnswer) -> ObservationRecorded | None:
    """Returns an environment's answer, maybe without its contents. None: it is a generation."""
    if isinstance(answer, UnreadAnswer):
        return answer.brief()
    return answer if isinstance(answer, ObservationRecorded) else None


def last_observed(answers: Iterable[KeptAnswer]) -> ObservationRecorded | None:
    """Returns the environment's newest answer among `answers`, maybe without its contents."""
    observed = (one for answer in answers if (one := observation_of(answer)) is not None)
    return max(observed, key=lambda answer: answer.index, default=None)
