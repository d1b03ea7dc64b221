"""Trains again on the batches that a run recorded: the same bytes in, the same weights out.

First each batch is rebuilt from the recorded results, through the same cores that made it, and
compared. Then it is copied, byte by byte, into the fresh namespace; its references lead into the
recorded one, whose trajectories are only read. The trainer's digests are compared at the end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.topics import BATCHES, GROUPS, POLICIES
from headrace.services.kafka.broker import Outgoing, Position, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.operate.replay.rebuilder import Rebuilder
from headrace.services.operate.replay.recording import (
    FETCHED,
    Kept,
    Progress,
    Recording,
    Results,
    chunks,
    make_fresh,
    read_results,
    read_topic,
)
from headrace.services.operate.replay.replay_training import ended_after, train
from headrace.stream_jobs.groups import GroupAssembler

BATCHES_HELD = 16
"""A batch has up to some MB."""


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where a recorded batch lies, and what retention has removed of it."""

    position: Position
    gone: int
    """Trajectories that it refers to and that are no longer kept."""


@dataclass
class Version:
    """One version: what the run recorded of it, and what came out now."""

    version: int
    batch: str
    """`same` where it was rebuilt byte by byte, `differs`, or `unknown`: results are gone."""
    recorded: PolicyPublished
    replayed: PolicyPublished | None = None

    @property
    def same(self) -> bool:
        """Whether the weights are the recorded ones, bit by bit."""
        return self.replayed is not None and self.replayed.digest == self.recorded.digest


@dataclass
class BatchesReplayed:
    """A replay over recorded batches."""

    namespace: str
    policy: str
    versions: list[Version] = field(default_factory=list)

    @property
    def differing(self) -> list[Version]:
        """Versions that came out otherwise, in batch or weights."""
        return [one for one in self.versions if not one.same or one.batch == "differs"]


async def replay_batches(
    recording: Recording,
    policy: str | None,
    *,
    until: int | None,
    into: str | None,
    say: Callable[[str], None],
    progress: Progress,
) -> BatchesReplayed:
    """Trains again on the batches of `policy` up to version `until`; None is all of them."""
    policy = recording.trained(policy)
    published = await _publications(recording.log, policy)
    batches = await _find_batches(recording.log, policy)
    last = _last_version(recording.namespace, policy, published, batches, until)
    batches = batches[:last]
    skipped = {number for number, one in published.items() if one.status == "skipped"}
    _require_trajectories(batches, skipped)
    verdicts = await _rebuild(recording, policy, batches, progress)
    log = await make_fresh(recording, into, recording.recipe)
    replayed = BatchesReplayed(log.topics.namespace, policy)
    replayed.versions = [Version(0, "same", published[0])] + [
        Version(number, verdict, published[number]) for number, verdict in enumerate(verdicts, 1)
    ]
    say(f"into namespace {replayed.namespace}")

    def on_version(one: PolicyPublished) -> None:
        replayed.versions[one.version].replayed = one
        progress("versions trained", one.version, last)

    reason = f"{last} batches of {policy} replayed"
    async with ended_after(log, recording.recipe, reason):
        await _copy(recording.log, log, policy, batches, progress)
        await train(
            log,
            recording.recipe,
            recording.cluster,
            policy,
            until=last,
            skipped=skipped,
            on_version=on_version,
        )
    return replayed


async def _publications(log: EventLog, policy: str) -> dict[int, PolicyPublished]:
    """The policy's versions; of each the last record counts. A skipped one stays so."""
    found: dict[int, PolicyPublished] = {}
    async with aclosing(read_topic(log, POLICIES)) as deliveries:
        async for delivery in deliveries:
            one = delivery.event
            if isinstance(one, PolicyPublished) and one.policy == policy:
                before = found.get(one.version)
                if before is not None and before.status == "skipped":
                    one = one.model_copy(update={"status": "skipped"})
                found[one.version] = one
    return found


async def _find_batches(log: EventLog, policy: str) -> list[BatchPlace]:
    """Where batch 1, 2, … lie; the first record of each counts. RecordsLost where one is gone."""
    kept, found = Kept(log), dict[int, BatchPlace]()
    async with aclosing(read_topic(log, BATCHES, policy)) as deliveries:
        async for delivery in deliveries:
            batch = delivery.event
            if isinstance(batch, BatchAssembled) and batch.version not in found:
                found[batch.version] = BatchPlace(
                    Position(delivery.partition, delivery.offset),
                    await kept.gone([sample.trajectory for sample in batch.samples]),
                )
    gone = next((n for n in range(1, max(found, default=0)) if n not in found), None)
    if gone is not None:
        after = min(number for number in found if number > gone)
        raise RecordsLost(
            f"batches {gone} to {after - 1} of {policy} are gone from {log.topics.namespace}: "
            "training begins at version 0, so it can't be repeated without them"
        )
    return [found[number] for number in sorted(found)]


def _last_version(
    namespace: str,
    policy: str,
    published: dict[int, PolicyPublished],
    batches: Sequence[BatchPlace],
    until: int | None,
) -> int:
    there = 0
    while there < len(batches) and there + 1 in published:
        there += 1
    if there == 0 or 0 not in published:
        raise UsageError(f"{namespace} has no batch that {policy} was trained on yet")
    if until is not None and until > there:
        raise UsageError(f"--until {until}: {namespace} trained {policy} up to version {there}")
    return there if until is None else until


def _require_trajectories(batches: Sequence[BatchPlace], skipped: Collection[int]) -> None:
    """RecordsLost where one is gone, but for batches that were not trained on."""
    needed = {
        number: batch.gone for number, batch in enumerate(batches, 1) if number not in skipped
    }
    wanting = [number for number, gone in needed.items() if gone]
    if wanting:
        raise RecordsLost(
            f"{sum(needed.values())} trajectories are no longer kept, which "
            f"batches {wanting[0]} to {wanting[-1]} refer to: training can't be repeated without "
            "them"
        )


async def _read(
    log: EventLog, batches: Sequence[BatchPlace]
) -> AsyncGenerator[tuple[Record, Delivery[BatchAssembled]], None]:
    for chunk in chunks(batches, BATCHES_HELD):
        for record in await log.broker.fetch([batch.position for batch in chunk]):
            yield record, cast("Delivery[BatchAssembled]", await log.decode(record))


async def _copy(
    recorded: EventLog,
    fresh: EventLog,
    policy: str,
    batches: Sequence[BatchPlace],
    progress: Progress,
) -> None:
    """Writes the batches' records as they are: value, key and headers."""
    name = fresh.topics.name(BATCHES, policy)
    done = 0
    async with aclosing(_read(recorded, batches)) as records:
        async for record, _ in records:
            assert record.value is not None
            await fresh.broker.send(
                Outgoing(name, record.key or b"", record.value, list(record.headers))
            )
            done += 1
            progress("batches copied", done, len(batches))


async def _rebuild(
    recording: Recording, policy: str, batches: Sequence[BatchPlace], progress: Progress
) -> list[str]:
    """Of each batch, whether the recorded results make it again: `same`, `differs`, `unknown`."""
    results = await read_results(recording.log)
    offsets, end = dict[int, int](), 0
    async with aclosing(read_topic(recording.log, GROUPS, policy)) as deliveries:
        async for delivery in deliveries:
            if isinstance(delivery.event, GroupClosed):
                offsets.setdefault(delivery.event.task, delivery.offset)
                end = delivery.offset + 1
    rebuilder = Rebuilder(recording.recipe, policy, offsets, end)
    verdicts: list[str] = []
    async with (
        aclosing(_groups(recording, policy, results)) as groups,
        aclosing(_read(recording.log, batches)) as records,
    ):
        async for _, batch in records:
            while rebuilder.wants(batch.event):
                rebuilder.on_group(*await anext(groups))
            verdicts.append(rebuilder.judge(batch.event))
            progress("batches rebuilt", len(verdicts), len(batches))
    return verdicts


async def _groups(
    recording: Recording, policy: str, results: Results
) -> AsyncGenerator[tuple[GroupClosed, int, bool], None]:
    """Each group with its offset, made again from its task's result; False where that is gone."""
    assembler = GroupAssembler(recording.recipe)

    async def again(held: Sequence[Delivery[GroupClosed]]) -> list[tuple[GroupClosed, int, bool]]:
        tasks = dict.fromkeys(one.event.task for one in held if one.event.task in results.places)
        made: dict[int, GroupClosed] = {}
        for result in await results.fetch(list(tasks)):
            for group in assembler.on_task(result.event, round(result.recorded_at * 1000)):
                if group.policy == policy:
                    made[group.task] = group
        return [
            (made.get(one.event.task, one.event), one.offset, one.event.task in made)
            for one in held
        ]

    held: list[Delivery[GroupClosed]] = []
    async with aclosing(read_topic(recording.log, GROUPS, policy)) as deliveries:
        async for delivery in deliveries:
            held.append(cast("Delivery[GroupClosed]", delivery))
            if len(held) == FETCHED:
                for group in await again(held):
                    yield group
                held.clear()
    for group in await again(held):
        yield group
