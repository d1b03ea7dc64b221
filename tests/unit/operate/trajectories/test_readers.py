"""Exports leave out what retention has removed, and read each part of the log once."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from headrace.errors import RecordsLost
from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    EpisodeEnded,
    GenerationCompleted,
    Ref,
    TaskEnded,
    TrajectoryRecorded,
    Turn,
)
from headrace.schemas.packed import pack_i32
from headrace.schemas.topics import GENERATIONS, TRAJECTORIES, Topics
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Outgoing, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.unpacked import Texts
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.sft.sft_examples import Examples, add_recorded
from headrace.services.operate.sft.sft_tokens import learned_sampling
from headrace.services.operate.trajectories import recorded_episodes
from headrace.services.operate.trajectories.export_sft import Selection
from headrace.services.operate.trajectories.recorded_episodes import EpisodeReader
from headrace.services.operate.trajectories.row_reader import RowReader
from tests.memory.memory_broker import MemoryCluster
from tests.memory.memory_registry import MemoryRegistry

TOPICS = Topics("old", ("default",), 2)
RECIPE = read_recipe("quickstart")


class CountingLog(EventLog):
    """Counts the records that it decodes, by topic."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.decoded: Counter[str] = Counter()

    async def decode(self, record: Record) -> Any:
        """See EventLog."""
        self.decoded[record.partition.topic] += 1
        return await super().decode(record)


class RecordedRun:
    """A run in memory."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        registry, codec = MemoryRegistry(), Codec()
        registry.prepare(codec, TOPICS)
        self.log = CountingLog(self.cluster.client("test"), TOPICS, codec, registry, "test")

    async def play(self, task: int, item_id: str = "i") -> TrajectoryRecorded:
        """Records a task of one episode with a turn, whose tokens say which item it is of."""
        tokens = pack_i32([2, ord(item_id)])
        turn = Turn(call="1", policy="default", context=pack_i32([1]), tokens=tokens)
        began = round(now() * 1000)
        await self.log.send(
            GenerationCompleted(
                task=task, sample=0, call="1", digest=bytes(16), policy="default", worker="w",
                finish="stop",
            )
        )  # fmt: skip
        trajectory = TrajectoryRecorded(
            task=task, sample=0, source="s", task_id=str(task), item_id=item_id, agent="default",
            turns=(turn,), reward=1.0, ending="finished", started=began, ended=round(now() * 1000),
        )  # fmt: skip
        await self.end(task, await self.log.send(trajectory), item_id)
        return trajectory

    async def end(self, task: int, ref: Ref, item_id: str = "i") -> None:
        """Records the result of a task."""
        outcome = EpisodeEnded(
            task=task, sample=0, item_id=item_id, ending="finished", trajectory=ref, reward=1.0
        )
        await self.log.send(
            TaskEnded(
                task=task, source="s", task_id=str(task), item_id=item_id, closed_by="all",
                outcomes=(outcome,),
            )
        )  # fmt: skip

    async def garbage(self, task: int) -> None:
        """Records the result of a task whose trajectory is not an event."""
        name, value = TOPICS.name(TRAJECTORIES), b"garbage"
        at = await self.log.broker.send(Outgoing(name, str(task).encode(), value))
        digest = hashlib.sha256(value).digest()[:16]
        number = at.partition.number
        ref = Ref(topic=name, partition=number, offset=at.offset, digest=digest)
        await self.end(task, ref)

    async def expire(self, keep: int) -> None:
        """Deletes all but the last `keep` trajectories of each partition."""
        partitions = TOPICS.partitions_of(TRAJECTORIES)
        for at, (_, end) in (await self.log.broker.ends(partitions)).items():
            self.cluster.expire(Partition(*at), end - keep)

    def reader(self, with_answers: bool = False) -> EpisodeReader:
        """Reads its episodes."""
        return EpisodeReader(self.log, Texts(RECIPE), with_answers=with_answers)


def on_run(test: Callable[[RecordedRun], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        run = RecordedRun()
        await run.log.broker.create_topics({t.name: (t.partitions, {}) for t in TOPICS})
        await test(run)
        await run.log.broker.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def tasks_of(reader: EpisodeReader, most: int = 1_000) -> list[int]:
    return sorted([one.recorded.task async for one in reader.read((), most)])


async def rows_of(reader: RowReader, most: int = 1_000) -> list[int]:
    return sorted([row.task async for rows in reader.read((), most) for row in rows])


def test_episodes_whose_trajectory_is_gone_are_left_out_and_counted() -> None:
    async def test(run: RecordedRun) -> None:
        for task in range(12):
            await run.play(task)
        whole = await tasks_of(run.reader())
        assert whole == list(range(12))
        await run.garbage(12)
        await run.expire(keep=3)
        episodes, rows = run.reader(), RowReader(run.log, RECIPE)
        kept = await tasks_of(episodes)
        assert await rows_of(rows) == kept
        assert len(kept) == 5, "three of each partition, but for the one that is garbage"
        assert 12 not in kept
        assert episodes.unread == rows.unread == 13 - 5

        assert len(await tasks_of(run.reader(), 4)) == 4, "what is gone takes no room"
        assert len(await rows_of(RowReader(run.log, RECIPE), 4)) == 4

    on_run(test)


def test_a_run_without_any_trajectory_left_is_an_error() -> None:
    async def test(run: RecordedRun) -> None:
        assert await tasks_of(run.reader()) == []
        for task in range(3):
            await run.play(task)
        await run.expire(keep=0)
        with pytest.raises(RecordsLost, match="the trajectories of all 3 episodes are gone"):
            await tasks_of(run.reader())
        with pytest.raises(RecordsLost, match="the trajectories of all 3 episodes are gone"):
            await rows_of(RowReader(run.log, RECIPE))

    on_run(test)


def test_answers_are_read_of_the_time_of_their_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_episodes, "SKEW_S", 0.002)
    monkeypatch.setattr(recorded_episodes, "FETCHED_AT_ONCE", 2)

    async def test(run: RecordedRun) -> None:
        for task in range(24):
            await run.play(task)
            await asyncio.sleep(0.006)  # the log's clock has milliseconds
        found = [one async for one in run.reader(with_answers=True).read((), 1_000)]
        assert sum(len(one.answers) for one in found) == 24
        # Each of 12 or more parts would read all of its partition, 12 on average.
        assert run.log.decoded[TOPICS.name(GENERATIONS)] < 4 * 24

    on_run(test)


def test_the_epochs_of_an_item_are_held_out_together() -> None:
    async def test(run: RecordedRun) -> None:
        for task, item in enumerate(("a", "b", "c", "a", "b", "a")):
            await run.play(task, item)
        await run.expire(keep=2)
        examples, reader = Examples(), run.reader()
        sampling = learned_sampling(RECIPE.policies["default"])
        sampling = sampling.model_copy(update={"allowed": b""})
        selection = Selection(RECIPE, None)
        await add_recorded(examples, selection, reader, "default", sampling, "")
        items = [chr(one.tokens[-1]) for one in examples.sequences]
        groups = [one.group for one in examples.sequences]
        assert len(set(zip(items, groups, strict=True))) == len(set(items)) == len(set(groups))
        assert len(items) == 4
        assert len(set(items)) < 4
        assert examples.remarks() == [
            "leaves out 2 episodes whose trajectory is gone or can't be decoded"
        ]

    on_run(test)
