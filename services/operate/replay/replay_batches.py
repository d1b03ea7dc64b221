"""Trains again on the batches that a run recorded: the same bytes must give the same weights.

First it assembles each batch again from the recorded results, with the code that made it, and
compares the two. Then it copies the recorded batch byte by byte into the new namespace. The
references in the batch point into the recorded namespace, whose trajectories it only reads. At the
end it compares the digests of the weights.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.events import BatchAssembled, GroupClosed, PolicyPublished
from headrace.schemas.topics import BATCHES, GROUPS
from headrace.services.kafka.broker import Outgoing, Position, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.kept_records import KeptRecords
from headrace.services.operate.find_versions import read_versions
from headrace.services.operate.replay.rebuilder import Rebuilder
from headrace.services.operate.replay.recording import (
    Recording,
    Results,
    chunks,
    make_fresh,
    read_results,
    read_topic,
    reading_recorded,
    sole_policy,
)
from headrace.services.operate.replay.replay_training import ended_after, train
from headrace.stream_jobs.groups import GroupAssembler

BATCHES_HELD = 16
"""Most batches in memory at once. A batch can have several MB."""


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """The location of a recorded batch."""

    position: Position
    missing: int
    """How many of the trajectories that it refers to are no longer kept."""


@dataclass
class ReplayedVersion:
    """One version as the run recorded it, and as it came out now."""

    batch: str
    """`same` if the rebuilt batch equals the recorded one, `differs`, or `unknown` if results are
    no longer kept."""
    recorded: PolicyPublished
    replayed: PolicyPublished | None = None

    @property
    def same(self) -> bool:
        """Whether the weights are exactly the recorded ones."""
        return self.replayed is not None and self.replayed.digest == self.recorded.digest


@dataclass
class BatchesReplayed:
    """The result of a replay of batches."""

    namespace: str
    policy: str
    versions: list[ReplayedVersion]


async def replay_batches(
    recording: Recording, policy: str | None, *, until: int | None, into: str | None
) -> BatchesReplayed:
    """Trains `policy` again on its recorded batches up to version `until`, or on all of them.

    `policy` may be None if the recipe trains only one. Raises UsageError if it is not clear what
    to train, and RecordsLost if retention has removed what is needed.
    """
    policy = sole_policy(recording.namespace, recording.recipe, policy)
    published = await read_versions(recording.log, policy)
    batches = await _find_batches(recording.log, policy)
    last = _last_version(recording.namespace, policy, published, batches, until)
    batches = batches[:last]
    skipped = {number for number, one in published.items() if one.status == "skipped"}
    _require_trajectories(batches, skipped)
    verdicts = await _rebuild(recording, policy, batches, skipped)
    recipe = reading_recorded(recording, recording.recipe)
    log = await make_fresh(recording, into, recipe)
    versions = [
        ReplayedVersion(verdict, published[number])
        for number, verdict in enumerate(["same", *verdicts])  # Version 0 has no batch.
    ]
    reason = f"{last} batches of {policy} replayed"
    async with ended_after(log, recipe, reason):
        await _copy(recording, log, policy, batches)
        for version in await train(recording, log, recipe, policy, until=last, skipped=skipped):
            versions[version.version].replayed = version
    return BatchesReplayed(log.topics.namespace, policy, versions)


async def _find_batches(log: EventLog, policy: str) -> list[BatchLocation]:
    """Finds the batches 1, 2, …. The first record of a batch counts.

    Raises RecordsLost if a batch between the first and the last is gone.
    """
    kept, found = KeptRecords(log.broker), dict[int, BatchLocation]()
    async with aclosing(read_topic(log, BATCHES, policy)) as deliveries:
        async for delivery in deliveries:
            batch = delivery.event
            if batch.version not in found:
                found[batch.version] = BatchLocation(
                    Position(delivery.partition, delivery.offset),
                    await kept.count_missing([sample.trajectory for sample in batch.samples]),
                )
    gone = next((n for n in range(1, max(found, default=0)) if n not in found), None)
    if gone is not None:
        after = min(number for number in found if number > gone)
        raise RecordsLost(
            f"batches {gone} to {after - 1} of policy {policy} are no longer in the log of "
            f"{log.topics.namespace}. Training begins at version 0 and needs every batch, so this "
            "run's batches can't be replayed"
        )
    return [found[number] for number in sorted(found)]


def _last_version(
    namespace: str,
    policy: str,
    published: dict[int, PolicyPublished],
    batches: Sequence[BatchLocation],
    until: int | None,
) -> int:
    last = 0
    while last < len(batches) and last + 1 in published:
        last += 1
    if last == 0 or 0 not in published:
        raise UsageError(
            f"{namespace} has not trained policy {policy} on a batch yet, so there is nothing to "
            "replay"
        )
    if until is not None and until > last:
        raise UsageError(
            f"--until {until}: {namespace} trained policy {policy} up to version {last}"
        )
    return last if until is None else until


def _require_trajectories(batches: Sequence[BatchLocation], skipped: Collection[int]) -> None:
    """Raises RecordsLost if a batch that is trained on refers to a trajectory that is gone."""
    missing = {
        number: batch.missing
        for number, batch in enumerate(batches, 1)
        if batch.missing and number not in skipped
    }
    if missing:
        raise RecordsLost(
            f"batches {min(missing)} to {max(missing)} refer to trajectories that are no longer in "
            f"the log ({sum(missing.values())} in all), so training can't be repeated"
        )


async def _read(log: EventLog, batches: Sequence[BatchLocation]) -> AsyncGenerator[Record]:
    for chunk in chunks(batches, BATCHES_HELD):
        for record in await log.broker.fetch([batch.position for batch in chunk]):
            yield record


async def _copy(
    recording: Recording, fresh: EventLog, policy: str, batches: Sequence[BatchLocation]
) -> None:
    """Copies the records of the batches: value, key and headers."""
    name = fresh.topics.name(BATCHES, policy)
    done = 0
    async with aclosing(_read(recording.log, batches)) as records:
        async for record in records:
            assert record.value is not None
            await fresh.broker.send(
                Outgoing(name, record.key or b"", record.value, list(record.headers))
            )
            done += 1
            recording.progress("batches copied", done, len(batches))


async def _rebuild(
    recording: Recording, policy: str, batches: Sequence[BatchLocation], skipped: Collection[int]
) -> list[str]:
    """Assembles each batch again from the recorded results: `same`, `differs` or `unknown`."""
    results = await read_results(recording.log)
    offsets: dict[int, int] = {}
    positions: list[Position] = []
    async with aclosing(read_topic(recording.log, GROUPS, policy)) as deliveries:
        async for group in deliveries:
            offsets.setdefault(group.event.task, group.offset)
            positions.append(Position(group.partition, group.offset))
    end = positions[-1].offset + 1 if positions else 0
    rebuilder = Rebuilder(recording.recipe, policy, offsets, end, skipped)
    verdicts: list[str] = []
    async with (
        aclosing(_groups(recording, policy, positions, results)) as groups,
        aclosing(_read(recording.log, batches)) as records,
    ):
        async for record in records:
            batch = (await recording.log.decode(record)).event
            assert isinstance(batch, BatchAssembled)
            while rebuilder.wants(batch):
                rebuilder.on_group(*await anext(groups))
            verdicts.append(rebuilder.judge(batch))
            recording.progress("batches rebuilt", len(verdicts), len(batches))
    return verdicts


async def _groups(
    recording: Recording, policy: str, positions: Sequence[Position], results: Results
) -> AsyncGenerator[tuple[GroupClosed, int, bool]]:
    """Yields the group at each position, its offset, and whether it was made again.

    A group is made again from its task's result. If the result is gone, the recorded group is
    yielded.
    """
    assembler = GroupAssembler(recording.recipe)
    for chunk in chunks(positions):
        recorded: dict[int, GroupClosed] = {}
        for record in await recording.log.broker.fetch(chunk):
            group = (await recording.log.decode(record)).event
            assert isinstance(group, GroupClosed)
            recorded[record.offset] = group
        tasks = dict.fromkeys(group.task for group in recorded.values())
        made: dict[int, GroupClosed] = {}
        for result in await results.fetch([task for task in tasks if task in results.locations]):
            for group in assembler.on_task(result.event, round(result.recorded_at * 1000)):
                if group.policy == policy:
                    made[group.task] = group
        for offset, group in recorded.items():
            yield made.get(group.task, group), offset, group.task in made
