"""Dead letters are counted by kind, and redriven once if their topic takes them back."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import Fenced, UsageError
from headrace.schemas.codec import Codec, avsc
from headrace.schemas.events import (
    ActionRequested,
    EnvironmentUse,
    GenerationRequested,
    Sampling,
    TaskSubmitted,
)
from headrace.schemas.topics import DEAD_LETTERS, TASKS, TOPICS
from headrace.services.kafka.broker import MAX_MESSAGE_BYTES, Outgoing, Partition, Position, Record
from headrace.services.log.dead_letter import WHY
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_records
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.dashboard.index.index_follower import IndexFollower
from headrace.services.operate.dead_letters.dead_letters import (
    REDRIVE_OF,
    REDRIVEN,
    DeadLetter,
    count_open,
    find_dead_letter,
    list_kinds,
    read_dead_letter,
    redrive,
    refuse_event,
    refuse_topic,
)
from headrace.services.operate.doctor.cluster_checks import dead_letters
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.operate.show.world import TOPICS as NAMESPACE_TOPICS
from tests.unit.operate.show.world import World, in_a_world

LATE_ID = 77
TASKS_PARTITION = Partition(NAMESPACE_TOPICS.name(TASKS), 0)
HEADERS = [("theirs", b"\xff")]


class Late(MemoryRegistry):
    """A registry that learns of a schema late."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, str] = {}

    def schema(self, schema_id: int) -> str | None:
        return self.known.get(schema_id)

    def learn(self) -> None:
        self.known[LATE_ID] = json.dumps(avsc(TaskSubmitted))


async def parked(world: World) -> tuple[EventLog, Late, bytes]:
    """A task under a schema that nobody knows, found by a reader: dead letter 0."""
    number = await world.submit("a")
    (record,) = await world.log.broker.fetch([Position(TASKS_PARTITION, number)])
    assert record.value is not None
    value = record.value[:1] + LATE_ID.to_bytes(4, "big") + record.value[5:]
    at = await world.log.broker.send(Outgoing(TASKS_PARTITION.topic, b"team/a", value, HEADERS))
    late, codec = Late(), Codec()
    late.prepare(codec, NAMESPACE_TOPICS)
    log = EventLog(world.log.broker, NAMESPACE_TOPICS, codec, late, "reader-1")
    await park(log, at)
    return log, late, value


async def park(log: EventLog, at: Position) -> None:
    (record,) = await log.broker.fetch([at])
    assert await log.decode_or_dead_letter(record) is None


async def outcomes(log: EventLog, world: World, *numbers: int) -> list[str]:
    return [refused async for _, refused in redrive(log, numbers or None, world.patience)]


def test_a_dead_letter_is_redriven_once_it_decodes_and_only_once() -> None:
    async def test(world: World) -> None:
        log, late, value = await parked(world)
        (refused,) = await outcomes(log, world, 0)
        assert refused == f"it still does not decode: the schema with id {LATE_ID} is not known"

        late.learn()
        assert await outcomes(log, world, 0) == [""]
        (redriven,) = await log.broker.fetch([Position(TASKS_PARTITION, 2)])
        assert (redriven.key, redriven.value) == (b"team/a", value)
        assert redriven.headers == [*HEADERS, (REDRIVE_OF, b"test.dead-letters.v1/0@0")]

        assert await outcomes(log, world, 0) == ["it was redriven already, as dead letter 0"]
        (kind,) = await list_kinds(log, world.patience)
        assert (kind.topic, kind.count, kind.redriven, kind.first) == (
            TASKS_PARTITION.topic,
            1,
            1,
            [0],
        )
        # What the dashboard counts: neither marks nor the markers of transactions.
        follower = IndexFollower(log, read_recipe("quickstart"))
        at = Partition(NAMESPACE_TOPICS.name(DEAD_LETTERS), 0)
        async with aclosing(read_records(log.broker, {at: WHOLE})) as records:
            async for record in records:
                await follower._take(record)
        counted = follower.index.dead_letters
        assert [(one.count, one.redriven) for one in counted.kinds()] == [(1, 1)]
        assert counted.waiting == 0
        assert await count_open(log) == (0, 1)
        found = await dead_letters(log)
        assert (found.state, found.text) == ("ok", "none is open, 1 redriven")

    in_a_world(test)


def test_a_record_that_two_readers_could_not_decode_is_redriven_once() -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        await park(log, Position(TASKS_PARTITION, 1))
        late.learn()
        assert await outcomes(log, world) == ["", "it was redriven already, as dead letter 0"]
        assert await outcomes(log, world, 1) == ["it was redriven already, as dead letter 0"]
        assert await count_open(log) == (0, 2)

    in_a_world(test)


def test_open_dead_letters_are_counted_without_reading_all() -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        await world.log.broker.send(Outgoing(NAMESPACE_TOPICS.name(DEAD_LETTERS), b"", b"garbage"))
        found = await dead_letters(log)
        assert (found.state, found.text) == ("warning", "2 open")
        late.learn()
        assert await outcomes(log, world, 0) == [""]
        await asyncio.sleep(0.01)  # the transaction's mark
        assert await count_open(log) == (1, 1)
        # Offsets: two dead letters, the record that one was redriven, and the transaction's mark.
        assert await count_open(log, 3) == (2, 0)
        assert (await dead_letters(log)).text == "1 open, 1 redriven"

    in_a_world(test)


def test_if_two_processes_redrive_the_later_one_goes_on() -> None:
    async def test(world: World) -> None:
        log, late, value = await parked(world)
        at = await world.log.broker.send(Outgoing(TASKS_PARTITION.topic, b"team/a", value))
        await park(log, at)
        late.learn()
        first = redrive(log, None, world.patience)
        assert (await anext(first))[1] == ""
        assert await outcomes(log, world) == ["it was redriven already, as dead letter 0", ""]
        with pytest.raises(Fenced):
            await anext(first)

    in_a_world(test)


@pytest.mark.parametrize("changed", ["key", "value", "offset", "partition"])
def test_what_only_looks_like_a_dead_letter_is_not_redriven(changed: str) -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        dead_letters = Partition(NAMESPACE_TOPICS.name(DEAD_LETTERS), 0)
        (genuine,) = await log.broker.fetch([Position(dead_letters, 0)])
        key, value, headers = genuine.key or b"", genuine.value or b"", dict(genuine.headers)
        match changed:
            case "key":
                key = b"team/b"
            case "value":
                value = value[:-1] + bytes([value[-1] ^ 1])
            case "offset":
                headers[f"{WHY}offset"] = b"2"
            case "partition":
                headers[f"{WHY}partition"] = b"1"
        forged = Outgoing(dead_letters.topic, key, value, list(headers.items()))
        await log.broker.send(forged)
        late.learn()
        (refused,) = await outcomes(log, world, 1)
        gone = changed in ("offset", "partition")
        assert ("is no longer in the log" if gone else "another program wrote it") in refused
        assert await outcomes(log, world, 0) == [""]

    in_a_world(test)


def test_a_redriven_record_has_its_own_headers_whatever_its_dead_letter_says() -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        dead_letters = Partition(NAMESPACE_TOPICS.name(DEAD_LETTERS), 0)
        (genuine,) = await log.broker.fetch([Position(dead_letters, 0)])
        assert genuine.key is not None
        assert genuine.value is not None
        headers = [*genuine.headers, ("theirs", b"forged")]
        await log.broker.send(Outgoing(dead_letters.topic, genuine.key, genuine.value, headers))
        late.learn()
        assert await outcomes(log, world, 1) == [""]
        (redriven,) = await log.broker.fetch([Position(TASKS_PARTITION, 2)])
        assert redriven.headers == [*HEADERS, (REDRIVE_OF, b"test.dead-letters.v1/0@1")]

    in_a_world(test)


def test_a_record_with_headers_that_leave_no_room_for_one_more_is_refused() -> None:
    async def test(world: World) -> None:
        log, late, value = await parked(world)
        full = Outgoing(TASKS_PARTITION.topic, b"team/a", value)
        room = MAX_MESSAGE_BYTES - full.size
        at = await log.broker.send(replace(full, headers=[("large", bytes(room - 20))]))
        headers = [
            (f"{WHY}topic", TASKS_PARTITION.topic.encode()),
            (f"{WHY}offset", b"%d" % at.offset),
        ]
        letter = Outgoing(NAMESPACE_TOPICS.name(DEAD_LETTERS), b"team/a", value, headers)
        await log.broker.send(letter)
        late.learn()
        assert await outcomes(log, world, 1) == ["its headers are too large to be written again"]

    in_a_world(test)


def test_a_number_without_a_dead_letter_is_an_error() -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        late.learn()
        with pytest.raises(UsageError, match="holds 0 to 0"):
            await outcomes(log, world, 0, 5)
        assert await outcomes(log, world) == [""]
        await outcomes(log, world)  # a committed record is seen a moment later, or by a successor
        with pytest.raises(UsageError, match="dead letter 0 was redriven"):
            await find_dead_letter(log, 1)

    in_a_world(test)


def test_every_topic_takes_dead_letters_back_or_says_why_not() -> None:
    refused = {
        one.topic.name for one in NAMESPACE_TOPICS if refuse_topic(NAMESPACE_TOPICS, one.name)
    }
    assert refused == {
        "runs",
        "episodes",
        "trajectories",
        "batches",
        "policies",
        "items",
        "loads",
        "quotas",
        "waiting",
        "limits",
        "audit",
        "shares",
    }
    fenced = {one.name for one in TOPICS if "fenced" in one.writer}
    assert fenced <= refused
    assert "not a topic of test" in refuse_topic(NAMESPACE_TOPICS, "other.tasks.v1")


def test_what_expired_or_lies_under_another_key_is_refused() -> None:
    common: dict[str, Any] = {
        "task": 5,
        "sample": 0,
        "call": "1",
        "digest": bytes(16),
        "expires_at": 10_000,
    }
    prompt = GenerationRequested(policy="default", sampling=Sampling(max_tokens=1), **common)
    action = ActionRequested(
        index=0, kind="reset", environment=EnvironmentUse(use="default"), **common
    )
    for event in (prompt, action):
        assert refuse_event(event, b"5", 9.0) == ""
        assert "expired" in refuse_event(event, b"5", 10.0)
        assert "the key of" in refuse_event(event, b"6", 9.0)


@pytest.mark.parametrize(
    ("headers", "location"),
    [
        ([], "/0@0"),
        ([(f"{WHY}topic", b"\xff"), (f"{WHY}offset", b"-1")], "\ufffd/0@0"),
        ([(REDRIVEN, b"no number")], "/0@0"),
        ([(REDRIVEN, "²".encode()), (f"{WHY}offset", "²".encode())], "/0@0"),
        ([(REDRIVEN, b"1" * 5_000), (f"{WHY}partition", b"1" * 5_000)], "/0@0"),
    ],
)
def test_a_foreign_record_is_a_dead_letter_without_a_location(
    headers: list[tuple[str, bytes]], location: str
) -> None:
    partition = Partition(NAMESPACE_TOPICS.name(DEAD_LETTERS), 0)
    dead_letter = read_dead_letter(Record(partition, 3, 0.0, None, None, headers))
    assert isinstance(dead_letter, DeadLetter)
    assert (dead_letter.number, dead_letter.location, dead_letter.value) == (3, location, b"")
    assert refuse_topic(NAMESPACE_TOPICS, dead_letter.topic)
