"""Finds the facts of a story without reading whole topics.

All events of a task are in the partition of its key, and none is older than its submission. So this
reads only that partition of each topic, from the time of the submission to the time of the task's
end, and decodes only records with the task's key. Batches are in the order of their versions, so it
finds a batch by stepping back from the end of the topic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import (
    BatchAssembled,
    EpisodeStarted,
    Event,
    PolicyPublished,
    TaskSubmitted,
)
from headrace.schemas.topics import BATCHES, EPISODES, GROUPS, POLICIES, RESULTS, TASKS
from headrace.services.kafka.broker import Partition
from headrace.services.kafka.convert import partition_of
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import OffsetRange, Patience, read_records
from headrace.services.operate.evaluation import EvaluationResult, Evaluations
from headrace.services.operate.show.facts import Fact, fact_of

SKEW_S = 60.0
"""The clocks of two writers may differ by this many seconds."""
MAX_BYTES = 64 * 1024 * 1024
"""Most bytes of records in a story. It leaves out the rest, with a remark."""
FIRST_STEP = 16
"""The search for a batch begins this many offsets before the end."""
LAST = 2**63 - 1
MOST_LISTED = 1_000
"""Most tasks of a label that are listed."""


class Gatherer:
    """Reads one namespace for one story."""

    def __init__(self, log: EventLog, patience: Patience) -> None:
        self.remarks: list[str] = []
        """What it could not read, for people."""
        self._log = log
        self._topics = log.topics
        self._patience = patience
        self._bytes = 0

    async def task(self, number: int, sample: int | None = None) -> list[Fact[Event]]:
        """Reads all facts of a task. With `sample`, it leaves out the work of other samples.

        Raises UsageError if there is no such task.
        """
        submitted = await self._submission(number)
        since = submitted.recorded_at if submitted is not None else 0.0
        facts: list[Fact[Event]] = [] if submitted is None else [submitted]
        key = str(number).encode()
        at = partition_of(key, self._topics.partitions)
        started = await self._starts(at, key, since)
        facts += started
        since = min((fact.recorded_at for fact in started), default=since)
        results = self._topics.partition(RESULTS, number=at)
        result = await _first(self._since(results, since, key))
        if started or result:
            until = None if result is None else result.recorded_at
            facts += await self._work(at, key, since, until, sample)
        if result is not None:
            facts += [result, *await self._training(number, key, result.recorded_at)]
        if not facts:
            raise UsageError(
                f"the log has no records of task {number} any more: retention removed them"
            )
        return facts

    async def number_of(self, source_and_id: str) -> int:
        """Finds the number of the task that its submitter calls `source/task_id`.

        It reads all of `tasks`, which is ordered only by number. Raises UsageError if there is no
        such task.
        """
        partition = self._topics.partition(TASKS)
        found = await _first(self._facts({partition: (0, LAST)}, source_and_id.encode()))
        if found is not None:
            return found.ref.offset
        raise UsageError(
            f"{partition.topic} has no task {source_and_id!r}. `headrace tail tasks` shows the "
            "newest tasks"
        )

    async def labelled(self, name: str, text: str) -> list[Fact[TaskSubmitted]]:
        """Finds the newest tasks that have a label, in the order of their numbers.

        It reads all of `tasks`. Raises UsageError if no task has the label.
        """
        partition = self._topics.partition(TASKS)
        found: deque[Fact[TaskSubmitted]] = deque(maxlen=MOST_LISTED)
        count = 0
        async with aclosing(self._facts({partition: (0, LAST)})) as facts:
            async for fact in facts:
                if fact.event.labels.get(name) == text:
                    found.append(fact)
                    count += 1
        if not found:
            raise UsageError(f"{partition.topic} has no task with the label {name}={text}")
        if count > MOST_LISTED:
            self.remarks.append(f"{count} tasks have the label; these are the newest {MOST_LISTED}")
        return list(found)

    async def batch(self, policy: str, version: int) -> Fact[BatchAssembled] | None:
        """Finds batch `version` of a policy. Returns None if it is not in the log."""
        partition = self._topics.partition(BATCHES, policy)
        first, end = (await self._log.broker.ends([partition]))[partition]
        back = FIRST_STEP
        while True:
            start = max(first, end - back)
            older, ahead = False, 0
            async with aclosing(self._facts({partition: (start, end)})) as facts:
                async for fact in facts:
                    found = fact.event.version
                    if found == version:
                        return fact
                    older = older or found < version
                    if found > version:
                        # A batch uses two offsets: for its record and its transaction's marker.
                        ahead = end - fact.ref.offset + 2 * (found - version)
                        break
            if older or start == first:
                return None
            back = max(2 * back, ahead + FIRST_STEP)

    async def publications(
        self, policy: str, version: int, since: float
    ) -> list[Fact[PolicyPublished]]:
        """Reads all publications of a version that were recorded from `since` (epoch s) on."""
        found: list[Fact[PolicyPublished]] = []
        partition = self._topics.partition(POLICIES)
        async with aclosing(self._since(partition, since, policy.encode())) as facts:
            async for fact in facts:
                if fact.event.version > version:
                    break
                if fact.event.version == version:
                    found.append(fact)
        return found

    async def evaluation(
        self, policy: str, version: int, since: float, passing: float
    ) -> EvaluationResult | None:
        """Evaluates a version by the tasks that ended from `since` (epoch s) on.

        Returns None if none of them evaluates it.
        """
        partitions = self._topics.partitions_of(RESULTS)
        starts = await self._log.broker.offsets_at(partitions, since - SKEW_S)
        found = Evaluations(passing)
        counted: set[str] = set()
        async with aclosing(self._facts({p: (starts[p], LAST) for p in partitions})) as facts:
            async for fact in facts:
                if fact.event.event_id not in counted:
                    counted.add(fact.event.event_id)
                    found.on_task_ended(fact.event)
        return found.of(policy).get(version)

    async def _submission(self, number: int) -> Fact[Event] | None:
        """Reads a task's submission. Returns None if retention removed it.

        Raises UsageError if there is no such task.
        """
        partition = self._topics.partition(TASKS)
        first, end = (await self._log.broker.ends([partition]))[partition]
        if number < first:
            self.remarks.append(
                f"retention removed the submission: {partition.topic} now begins at {first}"
            )
            return None
        found = await _first(self._facts({partition: (number, number + 1)}))
        if found is not None:
            return found
        held = f"holds {first} to {end - 1}" if first < end else "is empty"
        gap = ", but no task at this offset" if number < end else ""
        raise UsageError(
            f"there is no task {number}: {partition.topic} {held}{gap}. "
            "For a task of another run, name it with --namespace"
        )

    async def _starts(self, at: int, key: bytes, since: float) -> list[Fact[EpisodeStarted]]:
        """Reads the starts of the task's episodes, which are written together."""
        starts: dict[int, Fact[EpisodeStarted]] = {}
        partition = self._topics.partition(EPISODES, number=at)
        async with aclosing(self._since(partition, since, key)) as facts:
            async for fact in facts:
                starts.setdefault(fact.event.sample, fact)
                samples = 1 if fact.event.verdict is not None else fact.event.submitted.samples
                if len(starts) >= samples:
                    break
        return [starts[sample] for sample in sorted(starts)]

    async def _work(
        self, at: int, key: bytes, since: float, until: float | None, sample: int | None
    ) -> list[Fact[Event]]:
        """Reads what agents, policies and environments wrote until the task's end."""
        # All topics that are partitioned by task, without those that have been read already. Of
        # those whose writers choose the partition, all partitions.
        partitions = [
            partition
            for one in self._topics
            if not one.topic.single and one.topic not in (EPISODES, RESULTS)
            for partition in (one.all_partitions() if one.topic.pool else [Partition(one.name, at)])
        ]
        starts = await self._log.broker.offsets_at(partitions, since - SKEW_S)
        ends = dict.fromkeys(partitions, LAST)
        if until is not None:
            ends = await self._log.broker.offsets_at(partitions, until + SKEW_S)
        ranges = {one: (starts[one], ends[one]) for one in partitions}
        found = []
        async for fact in self._facts(ranges, key, held=True):
            if sample is None or getattr(fact.event, "sample", sample) == sample:
                found.append(fact)
        return found

    async def _training(self, number: int, key: bytes, since: float) -> list[Fact[Event]]:
        """Reads each policy's group of the task, the batch that decided it, and its version."""
        found: list[Fact[Event]] = []
        for policy in self._topics.policies:
            groups = self._topics.partition(GROUPS, policy)
            group = await _first(self._since(groups, since, key))
            if group is None:
                continue
            found.append(group)
            batches = self._topics.partition(BATCHES, policy)
            # The first batch whose frontier contains the task decided it.
            batch = await _first(
                self._since(batches, group.recorded_at, policy.encode()),
                lambda fact: number in fact.event.frontier(),
            )
            if batch is not None:
                version, at = batch.event.version, batch.recorded_at
                found += [batch, *await self.publications(policy, version, at)]
        return found

    async def _since(
        self, partition: Partition, since: float, key: bytes
    ) -> AsyncGenerator[Fact[Any]]:
        """Yields the facts of one key from a time on, less SKEW_S."""
        start = (await self._log.broker.offsets_at([partition], since - SKEW_S))[partition]
        async with aclosing(self._facts({partition: (start, LAST)}, key)) as facts:
            async for fact in facts:
                yield fact

    async def _facts(
        self,
        ranges: Mapping[Partition, OffsetRange],
        key: bytes | None = None,
        *,
        held: bool = False,
    ) -> AsyncGenerator[Fact[Any]]:
        """Yields the facts in these offset ranges: those of `key`, or all if it is None.

        The topic says which event a fact has. If the caller keeps all of them in memory (`held`),
        they count towards MAX_BYTES.
        """
        async with aclosing(read_records(self._log.broker, ranges, self._patience)) as records:
            async for record in records:
                if key is not None and record.key != key:
                    continue
                at = f"{record.partition.topic}/{record.partition.number}@{record.offset}"
                self._bytes += len(record.value or b"") if held else 0
                if self._bytes > MAX_BYTES:
                    self.remarks.append(
                        f"the records from {at} on are left out: the story has more than "
                        f"{MAX_BYTES >> 20} MiB"
                    )
                    return
                try:
                    yield await fact_of(self._log, record)
                except DecodeError as error:
                    self.remarks.append(f"{at} does not decode: {error.reason}")


async def _first(
    facts: AsyncGenerator[Fact[Any]], accept: Callable[[Fact[Any]], bool] = lambda _: True
) -> Fact[Any] | None:
    """Returns the first fact that `accept` accepts, and reads no further."""
    async with aclosing(facts):
        async for fact in facts:
            if accept(fact):
                return fact
    return None


def only_policy(policies: Sequence[str], policy: str | None) -> str:
    """Returns `policy`, or the only one if it is None. Else raises UsageError."""
    if policy is None and len(policies) == 1:
        return policies[0]
    if policy is not None and policy in policies:
        return policy
    names = ", ".join(policies)
    raise UsageError(
        f"there are several policies: name one, as in batch:{policies[0]}/7 ({names})"
        if policy is None
        else f"there is no policy {policy!r} in this namespace; it has: {names}"
    )
