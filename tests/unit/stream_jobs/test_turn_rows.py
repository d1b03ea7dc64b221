"""A long turn is cut into rows, and its rows joined are the turn."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from headrace.schemas.codec import Codec
from headrace.schemas.events import (
    EpisodeEnded,
    GroupClosed,
    GroupSample,
    Ref,
    TaskEnded,
    TrajectoryRecorded,
    Turn,
    TurnProjected,
)
from headrace.schemas.packed import pack_f32, pack_i32
from headrace.schemas.topics import DEAD_LETTERS, TRAJECTORIES, TURNS
from headrace.services.kafka.broker import Outgoing, Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.unpacked import Texts
from headrace.services.namespace.apply import commit_first_offsets, lags
from headrace.services.namespace.cluster_config import read_recipe
from headrace.stream_jobs.turn_rows.project_turns import run
from headrace.stream_jobs.turn_rows.turn_rows import PIECE_CHARACTERS, PIECE_TOKENS, turn_rows
from tests.memory.memory_broker import MemoryBroker
from tests.unit.stream_jobs.test_assemble_batches import a_context, make_topics
from tests.unit.stream_jobs.test_batches import a_recipe

REF = Ref(topic="n.trajectories.v1", partition=0, offset=0, digest=bytes(16))
OUTCOME = EpisodeEnded(task=7, sample=0, item_id="i", ending="finished", trajectory=REF, reward=1.0)
ENDED = TaskEnded(
    task=7, source="s", task_id="t", item_id="i", closed_by="all", outcomes=(OUTCOME,),
    labels={"a": "b"},
)  # fmt: skip
TEXTS = Texts(read_recipe("quickstart"))


def rows_of(turns: tuple[Turn, ...], *groups: GroupClosed) -> list[TurnProjected]:
    trajectory = TrajectoryRecorded(
        task=7, sample=0, source="s", task_id="t", item_id="i", agent="default", turns=turns,
        ending="finished", started=1, ended=2,
    )  # fmt: skip
    return list(turn_rows(ENDED, OUTCOME, trajectory, groups, TEXTS))


def group(*advantages: float) -> GroupClosed:
    sample = GroupSample(
        sample=0, trajectory=REF, reward=1.0, advantages=pack_f32(advantages), tokens=1, longest=1,
        oldest_version=0,
    )  # fmt: skip
    return GroupClosed(task=7, policy="default", item_id="i", verdict="scored", samples=(sample,))


def test_a_long_turn_has_several_rows_that_fit() -> None:
    count = 3 * PIECE_TOKENS + 5
    text = "é" * (PIECE_CHARACTERS + 1)
    turn = Turn(
        call="1",
        policy="elsewhere",  # This machine does not have its tokenizer.
        context=pack_i32(range(count)),
        tokens=pack_i32(range(count)),
        logprobs=pack_f32([-0.5] * count),
        teacher=pack_f32([-1.5] * count),
        versions=pack_i32([0, 3, PIECE_TOKENS + 1, 4]),
        text=text,
    )
    rows = rows_of((turn,))
    assert [(one.part, one.parts) for one in rows] == [(part, 4) for part in range(4)]
    assert [token for one in rows for token in one.tokens] == list(range(count))
    assert [token for one in rows for token in one.context] == list(range(count))
    assert sum(len(one.logprobs) for one in rows) == sum(len(one.teacher) for one in rows) == count
    versions = [version for one in rows for version in one.versions]
    assert versions == [3] * (PIECE_TOKENS + 1) + [4] * (count - PIECE_TOKENS - 1)
    assert "".join(one.text for one in rows) == text
    assert {one.version for one in rows} == {4}
    assert {one.context_text for one in rows} == {None}
    codec = Codec()
    codec.register(TurnProjected, 1)
    assert [codec.decode(TurnProjected, codec.encode(one)) for one in rows] == rows


def test_advantages_are_those_of_the_group() -> None:
    turns = tuple(
        Turn(call=str(number), policy=policy, tokens=pack_i32([1]), trainable=number != 3)
        for number, policy in enumerate(("default", "other", "default", "default"))
    )
    assert [one.advantage for one in rows_of(turns, group(0.5))] == [0.5, None, 0.5, None]
    assert [one.advantage for one in rows_of(turns, group(1, 2, 3))] == [1.0, None, 2.0, None]
    assert [one.advantage for one in rows_of(turns)] == [None] * 4


def test_wrong_packed_fields_give_empty_arrays() -> None:
    (row,) = rows_of((Turn(call="1", policy="default", tokens=b"123", versions=b"1"),))
    assert (row.tokens, row.versions, row.version) == ((), (), None)


def test_a_trajectory_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    """One is no event, one was never written, and a third is good."""

    async def main() -> None:
        broker = MemoryBroker()
        context = a_context(broker, "space", a_recipe(), tmp_path)
        log = context.log
        await make_topics(log)
        await commit_first_offsets(broker, log.topics)
        topic = log.topics.name(TRAJECTORIES)
        garbage = await broker.send(Outgoing(topic, b"1", b"\xffgarbage", [], 0))
        refs = [
            Ref(topic=topic, partition=0, offset=garbage.offset, digest=digest_of(b"\xffgarbage")),
            Ref(topic=topic, partition=1, offset=99, digest=bytes(16)),
            await log.send(a_trajectory(3)),
        ]
        for task, ref in enumerate(refs, 1):
            outcome = OUTCOME.model_copy(update={"task": task, "trajectory": ref})
            await log.send(ENDED.model_copy(update={"task": task, "outcomes": (outcome,)}))
        job = asyncio.ensure_future(run(context))
        rows, letters = (log.topics.partitions_of(one) for one in (TURNS, DEAD_LETTERS))
        async with asyncio.timeout(20):
            while not all([await count(log, rows), await count(log, letters)]):
                await asyncio.sleep(0.05)
            while any((await lags(broker, log.topics, ["project-turns"])).values()):
                await asyncio.sleep(0.05)
        assert (await count(log, rows), await count(log, letters)) == (1, 1)
        context.stopping.set()
        await asyncio.wait_for(job, 20)
        await broker.close()

    asyncio.run(main())


async def count(log: EventLog, partitions: Sequence[Partition]) -> int:
    return sum(end - first for first, end in (await log.broker.ends(partitions)).values())


def digest_of(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:16]


def a_trajectory(task: int) -> TrajectoryRecorded:
    return TrajectoryRecorded(
        task=task, sample=0, source="s", task_id="t", item_id="i", agent="default",
        turns=(Turn(call="1", policy="default"),), ending="finished", started=1, ended=2,
    )  # fmt: skip
