"""Finds a story's facts without reading whole topics.

A task's events all lie in the partition of its key, and none is older than its submission: so of
each topic only that partition is read, from the time of the submission to the time of the task's
end, and only records of the task's key are decoded. A batch is found by stepping back from the
end of its topic: batches lie in the order of their versions.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import (
    BatchAssembled,
    EpisodeStarted,
    Event,
    PolicyPublished,
    TaskEnded,
)
from headrace.schemas.topics import (
    ACTIONS,
    BATCHES,
    EPISODES,
    GENERATIONS,
    GROUPS,
    OBSERVATIONS,
    OUTCOMES,
    POLICIES,
    PROMPTS,
    RESULTS,
    TASKS,
    TRAJECTORIES,
    Topic,
)
from headrace.services.kafka.broker import Partition
from headrace.services.kafka.murmur2 import partition_of
from headrace.services.log.event_log import EventLog
from headrace.services.log.scan import OffsetRange, Patience, scan
from headrace.services.operate.evaluation import EvaluationResult, Evaluations
from headrace.services.operate.show.facts import Fact, fact_of

SKEW_S = 60.0
"""By how much the clocks of those who write may differ."""
MAX_BYTES = 64 * 1024 * 1024
"""Of the records of one story; what is beyond is left out, with a remark."""
FIRST_STEP = 16
"""Offsets before the end at which the search for a batch begins."""
LAST = 2**63 - 1


class Gatherer:
    """Reads one namespace for one story."""

    def __init__(self, log: EventLog, patience: Patience) -> None:
        self.remarks: list[str] = []
        """What could not be read, for people."""
        self._log = log
        self._patience = patience
        self._bytes = 0

    async def task(self, number: int, sample: int | None = None) -> list[Fact[Event]]:
        """All facts of a task; with `sample`, those of its other episodes left out.

        UsageError where there is no such task.
        """
        submitted = await self._submission(number)
        since = submitted.recorded_at if submitted is not None else 0.0
        facts: list[Fact[Event]] = [] if submitted is None else [submitted]
        key = str(number).encode()
        here = partition_of(key, self._log.topics.partitions)
        started = await self._starts(here, key, since)
        facts += started
        since = min((fact.recorded_at for fact in started), default=since)
        result = await _first(self._since(self._place(RESULTS, here), since, key))
        if started or result:
            until = None if result is None else result.recorded_at
            facts += await self._work(here, key, since, until, sample)
        if result is not None:
            facts += [result, *await self._learning(number, key, result.recorded_at)]
        if not facts:
            raise UsageError(f"nothing is kept of task {number}: retention removed it")
        return facts

    async def number_of(self, source_and_id: str) -> int:
        """The number of the task that a submitter knows as `source/task_id`.

        UsageError where `tasks` has none. Reads the whole topic: its order is by number alone.
        """
        place = self._place(TASKS, 0)
        found = await _first(self._facts({place: (0, LAST)}, source_and_id.encode()))
        if found is not None:
            return found.ref.offset
        raise UsageError(
            f"no task {source_and_id!r} in {place.topic}: `headrace tail tasks` shows what is there"
        )

    async def batch(self, policy: str, version: int) -> Fact[Event] | None:
        """Batch `version` of a policy; None where it is not in the log."""
        place = self._place(BATCHES, 0, policy)
        first, end = (await self._log.broker.ends([place]))[place]
        back = FIRST_STEP
        while True:
            start = max(first, end - back)
            older, ahead = False, 0
            async with aclosing(self._facts({place: (start, end)})) as facts:
                async for fact in facts:
                    found = _version(fact)
                    if found == version:
                        return fact
                    older = older or found < version
                    if found > version:
                        # A batch takes two offsets: its record's, and its transaction's mark.
                        ahead = end - fact.ref.offset + 2 * (found - version)
                        break
            if older or start == first:
                return None
            back = max(2 * back, ahead + FIRST_STEP)

    async def publications(
        self, policy: str, version: int, since: float
    ) -> AsyncGenerator[Fact[Event]]:
        """All publications of a version, read from a time on, up to the next version's."""
        place = self._place(POLICIES, 0)
        async with aclosing(self._since(place, since, policy.encode())) as facts:
            async for fact in facts:
                if _version(fact) > version:
                    return
                if _version(fact) == version:
                    yield fact

    async def evaluation(
        self, policy: str, version: int, since: float, passing: float
    ) -> EvaluationResult | None:
        """What tasks that ended from a time on say of a version; None where none evaluates it."""
        places = [self._place(RESULTS, number) for number in range(self._log.topics.partitions)]
        starts = await self._log.broker.offsets_at(places, since - SKEW_S)
        found = Evaluations(passing)
        counted: set[str] = set()
        async with aclosing(self._facts({p: (starts[p], LAST) for p in places})) as facts:
            async for fact in facts:
                if isinstance(fact.event, TaskEnded) and fact.event.event_id not in counted:
                    counted.add(fact.event.event_id)
                    found.on_task_ended(fact.event)
        return found.of(policy).get(version)

    async def record(self, place: Partition, offset: int) -> Fact[Event] | None:
        """The event at an offset; None where there is none."""
        return await _first(self._facts({place: (offset, offset + 1)}))

    async def _submission(self, number: int) -> Fact[Event] | None:
        """The task's submission; None where retention removed it. UsageError without a task."""
        place = self._place(TASKS, 0)
        first, end = (await self._log.broker.ends([place]))[place]
        if number < first:
            self.remarks.append(f"its submission is gone: {place.topic} begins at {first} now")
            return None
        found = await self.record(place, number)
        if found is not None:
            return found
        raise UsageError(
            f"no task {number}: {place.topic} "
            + (f"holds {first} to {end - 1}" if first < end else "is empty")
            + (", and no task at that offset" if number < end else "")
        )

    async def _starts(self, here: int, key: bytes, since: float) -> list[Fact[Event]]:
        """The starts of the task's episodes: they are written together."""
        starts: dict[int, Fact[Event]] = {}
        async with aclosing(self._since(self._place(EPISODES, here), since, key)) as facts:
            async for fact in facts:
                assert isinstance(fact.event, EpisodeStarted)
                starts.setdefault(fact.event.sample, fact)
                samples = 1 if fact.event.verdict is not None else fact.event.submitted.samples
                if len(starts) >= samples:
                    break
        return [starts[sample] for sample in sorted(starts)]

    async def _work(
        self, here: int, key: bytes, since: float, until: float | None, sample: int | None
    ) -> list[Fact[Event]]:
        """What agents, policies and environments wrote, from a start to the task's end."""
        places = [self._place(PROMPTS, here, policy) for policy in self._log.topics.policies]
        for topic in (GENERATIONS, ACTIONS, OBSERVATIONS, TRAJECTORIES, OUTCOMES):
            places.append(self._place(topic, here))
        starts = await self._log.broker.offsets_at(places, since - SKEW_S)
        ends = dict.fromkeys(places, LAST)
        if until is not None:
            ends = await self._log.broker.offsets_at(places, until + SKEW_S)
        ranges = {place: (starts[place], ends[place]) for place in places}
        found = []
        async for fact in self._facts(ranges, key, held=True):
            if sample is None or getattr(fact.event, "sample", sample) == sample:
                found.append(fact)
        return found

    async def _learning(self, number: int, key: bytes, since: float) -> list[Fact[Event]]:
        """Each policy's group of the task, the batch that decided it, and what it became."""
        found: list[Fact[Event]] = []
        for policy in self._log.topics.policies:
            group = await _first(self._since(self._place(GROUPS, 0, policy), since, key))
            if group is None:
                continue
            found.append(group)
            batch = await self._deciding(policy, number, group.recorded_at)
            if batch is not None:
                found.append(batch)
                async for published in self.publications(
                    policy, _version(batch), batch.recorded_at
                ):
                    found.append(published)
        return found

    async def _deciding(self, policy: str, number: int, since: float) -> Fact[Event] | None:
        """The first batch whose frontier has the task."""

        def decides(fact: Fact[Event]) -> bool:
            assert isinstance(fact.event, BatchAssembled)
            return number in fact.event.frontier()

        place = self._place(BATCHES, 0, policy)
        return await _first(self._since(place, since, policy.encode()), decides)

    async def _since(
        self, place: Partition, since: float, key: bytes
    ) -> AsyncGenerator[Fact[Event]]:
        """The facts of one key from a time on, with room for clocks that differ."""
        start = (await self._log.broker.offsets_at([place], since - SKEW_S))[place]
        async with aclosing(self._facts({place: (start, LAST)}, key)) as facts:
            async for fact in facts:
                yield fact

    async def _facts(
        self,
        ranges: Mapping[Partition, OffsetRange],
        key: bytes | None = None,
        *,
        held: bool = False,
    ) -> AsyncGenerator[Fact[Event]]:
        """What these offset ranges hold of one key, or of all. `held`: all of it is kept in memory."""
        async with aclosing(scan(self._log.broker, ranges, self._patience)) as records:
            async for record in records:
                if key is not None and record.key != key:
                    continue
                place = f"{record.partition.topic}/{record.partition.number}@{record.offset}"
                self._bytes += len(record.value or b"") if held else 0
                if self._bytes > MAX_BYTES:
                    self.remarks.append(f"more than {MAX_BYTES >> 20} MiB: left out from {place}")
                    return
                try:
                    yield await fact_of(self._log, record)
                except DecodeError as error:
                    self.remarks.append(f"{place} is no event: {error.reason}")

    def _place(self, topic: Topic[Any], number: int, policy: str | None = None) -> Partition:
        return Partition(self._log.topics.name(topic, policy), number)


async def _first(
    facts: AsyncGenerator[Fact[Event]], accept: Callable[[Fact[Event]], bool] = lambda _: True
) -> Fact[Event] | None:
    """The first fact that is accepted; reads no further."""
    async with aclosing(facts):
        async for fact in facts:
            if accept(fact):
                return fact
    return None


def _version(fact: Fact[Event]) -> int:
    assert isinstance(fact.event, BatchAssembled | PolicyPublished)
    return fact.event.version


def only_policy(policies: Sequence[str], policy: str | None) -> str:
    """The policy asked for, or the only one. UsageError names those that there are."""
    if policy is None and len(policies) == 1:
        return policies[0]
    if policy is not None and policy in policies:
        return policy
    names = ", ".join(policies)
    raise UsageError(
        f"there are several policies: name one, as batch:{policies[0]}/7 ({names})"
        if policy is None
        else f"no policy {policy!r} in this namespace; it has: {names}"
    )
