"""Dead letters: told apart, and put back once, where that is right."""

from __future__ import annotations

import json

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
from headrace.services.kafka.broker import Outgoing, Partition, Position, Record
from headrace.services.log.event_log import WHY, EventLog
from headrace.services.operate.dead_letters.dead_letters import (
    RETRIED,
    RETRY_OF,
    DeadLetter,
    find_dead_letter,
    list_kinds,
    read_dead_letter,
    refuse_event,
    refuse_topic,
    retry,
)
from tests.unit.operate.show.world import TOPICS as PLACED
from tests.unit.operate.show.world import World, in_a_world

LATE_ID = 77
TASKS_PLACE = Partition(PLACED.name(TASKS), 0)
HEADERS = [("theirs", b"\xff")]


class Late:
    """A registry that learns of a schema late."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}

    def schema(self, schema_id: int) -> str | None:
        return self.known.get(schema_id)

    def learn(self) -> None:
        self.known[LATE_ID] = json.dumps(avsc(TaskSubmitted))


async def parked(world: World) -> tuple[EventLog, Late, bytes]:
    """A task under a schema that nobody knows, found by a reader; letter 0."""
    number = await world.submit("a")
    (record,) = await world.log.broker.fetch([Position(TASKS_PLACE, number)])
    assert record.value is not None
    value = record.value[:1] + LATE_ID.to_bytes(4, "big") + record.value[5:]
    at = await world.log.broker.send(Outgoing(TASKS_PLACE.topic, b"team/a", value, HEADERS))
    late = Late()
    log = EventLog(world.log.broker, PLACED, Codec(), late, "reader-1")
    await park(log, at)
    return log, late, value


async def park(log: EventLog, at: Position) -> None:
    (record,) = await log.broker.fetch([at])
    assert await log.decode_or_dead_letter(record) is None


async def outcomes(log: EventLog, world: World, *numbers: int) -> list[str]:
    return [one.refused async for one in retry(log, numbers or None, world.patience)]


def test_a_letter_is_put_back_once_it_decodes_and_only_once() -> None:
    async def test(world: World) -> None:
        log, late, value = await parked(world)
        (refused,) = await outcomes(log, world, 0)
        assert refused == f"it still does not decode: the schema with id {LATE_ID} is not known"

        late.learn()
        assert await outcomes(log, world, 0) == [""]
        (back,) = await log.broker.fetch([Position(TASKS_PLACE, 2)])
        assert (back.key, back.value) == (b"team/a", value)
        assert back.headers == [*HEADERS, (RETRY_OF, b"test.dead-letters.v1/0@0")]

        assert await outcomes(log, world, 0) == ["it was put back already, as letter 0"]
        (kind,) = await list_kinds(log, world.patience)
        assert (kind.topic, kind.count, kind.retried, kind.first) == (TASKS_PLACE.topic, 1, 1, [0])

    in_a_world(test)


def test_a_record_that_two_readers_parked_is_put_back_once() -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        await park(log, Position(TASKS_PLACE, 1))
        late.learn()
        assert await outcomes(log, world) == ["", "it was put back already, as letter 0"]
        assert await outcomes(log, world, 1) == ["it was put back already, as letter 0"]

    in_a_world(test)


def test_of_two_that_put_letters_back_the_later_goes_on() -> None:
    async def test(world: World) -> None:
        log, late, value = await parked(world)
        at = await world.log.broker.send(Outgoing(TASKS_PLACE.topic, b"team/a", value))
        await park(log, at)
        late.learn()
        first = retry(log, None, world.patience)
        assert (await anext(first)).refused == ""
        assert await outcomes(log, world) == ["it was put back already, as letter 0", ""]
        with pytest.raises(Fenced):
            await anext(first)

    in_a_world(test)


def test_what_is_no_letter_is_said() -> None:
    async def test(world: World) -> None:
        log, late, _ = await parked(world)
        late.learn()
        with pytest.raises(UsageError, match="holds 0 to 0"):
            await outcomes(log, world, 0, 5)
        assert await outcomes(log, world) == [""]
        await outcomes(log, world)  # a committed record is seen a moment later, or by a successor
        with pytest.raises(UsageError, match="the mark that 0 was put back"):
            await find_dead_letter(log, 1, world.patience)

    in_a_world(test)


def test_every_topic_takes_letters_back_or_says_why_not() -> None:
    refused = {one.topic.name for one in PLACED if refuse_topic(PLACED, one.name)}
    assert refused == {"runs", "episodes", "trajectories", "batches", "policies"}
    fenced = {one.name for one in TOPICS if "fenced" in one.writer}
    assert fenced <= refused
    assert "no topic of test" in refuse_topic(PLACED, "other.tasks.v1")


def test_what_expired_or_lies_under_another_key_is_refused() -> None:
    common = {"task": 5, "sample": 0, "call": "1", "digest": bytes(16), "expires_at": 10_000}
    prompt = GenerationRequested(policy="default", sampling=Sampling(max_tokens=1), **common)
    action = ActionRequested(
        index=0, kind="reset", environment=EnvironmentUse(use="default"), **common
    )
    for event in (prompt, action):
        assert refuse_event(event, b"5", 9.0) == ""
        assert "expired" in refuse_event(event, b"5", 10.0)
        assert "that of" in refuse_event(event, b"6", 9.0)


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ([], ("", 0, 0)),
        ([(f"{WHY}topic", b"\xff"), (f"{WHY}offset", b"-1")], ("\ufffd", 0, 0)),
        ([(RETRIED, b"no number")], ("", 0, 0)),
    ],
)
def test_a_foreign_record_is_a_letter_that_lay_nowhere(
    headers: list[tuple[str, bytes]], origin: tuple[str, int, int]
) -> None:
    place = Partition(PLACED.name(DEAD_LETTERS), 0)
    dead_letter = read_dead_letter(Record(place, 3, 0.0, None, None, headers))
    assert isinstance(dead_letter, DeadLetter)
    assert (dead_letter.number, dead_letter.origin, dead_letter.value) == (3, origin, b"")
    assert refuse_topic(PLACED, dead_letter.origin[0])
