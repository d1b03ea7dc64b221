"""Dead letters: what there is, what one of them says, and putting one back into its topic.

A letter is put back as it was, key, value and headers, once its bytes decode: because the registry
knows its schema by now, or a bug is mended. Record and mark are one transaction of the only writer
of that kind: so a letter is put back once, whoever tries at the same time and whatever dies. The
mark is a record in `dead-letters` that names the letter.

Not every topic takes one back. Where the place or the order of records is their meaning, or one
fenced service alone decides, a copy that comes late would be wrong: REFUSED says why.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import ActionRequested, Event, GenerationRequested
from headrace.schemas.topics import (
    BATCHES,
    DEAD_LETTERS,
    EPISODES,
    POLICIES,
    RUNS,
    TRAJECTORIES,
    Topics,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Headers, Outgoing, Partition, Record
from headrace.services.log.event_log import WHY, EventLog
from headrace.services.log.log_reader import WHOLE, Patience, read_records

RETRY_OF = "headrace.retry_of"
"""Header of a record that was put back: the letter's place."""
RETRIED = "headrace.retried"
"""Header of a mark in `dead-letters`: the number of the letter that was put back."""
MAX_KINDS = 1_000
"""Kinds of letters that a list tells apart; the rest is counted together."""
SHOWN_IDS = 3

REFUSED = {
    RUNS.name: "where a run stands is said by `headrace apply` and `run` alone, in order",
    EPISODES.name: "the scheduler alone writes it, fenced: it starts each sample once",
    TRAJECTORIES.name: "an outcome names a trajectory by its place, and a copy would lie "
    "elsewhere; once it decodes, it is read where it lies",
    BATCHES.name: "assemble-batches alone writes it, fenced, and its order is that of training",
    POLICIES.name: "the trainer alone writes it, fenced, in the order of versions",
}
"""Topics that take no letter back, and why."""

Origin = tuple[str, int, int]
"""Topic, partition and offset where the record lay."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that was no event. Its number is its offset in `dead-letters`."""

    number: int
    at: float
    """When it was parked, in epoch seconds."""
    origin: Origin
    reason: str
    reader: str
    """Who found it."""
    key: bytes
    value: bytes
    headers: Headers
    """The record's own."""


@dataclass(slots=True)
class Kind:
    """Letters of one topic and reason."""

    topic: str
    reason: str
    count: int = 0
    retried: int = 0
    first: list[int] = field(default_factory=list)
    """Numbers of the first few."""
    last_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Retry:
    """What came of trying to put a letter back."""

    number: int
    origin: Origin
    refused: str
    """Why not; empty where it was put back."""

    def to_tree(self) -> dict[str, Any]:
        """For JSON."""
        return {"letter": self.number, "from": place(self.origin), "refused": self.refused}


def place(origin: Origin) -> str:
    """An origin as people write it, and `headrace show` reads it."""
    return f"{origin[0]}/{origin[1]}@{origin[2]}"


def read_dead_letter(record: Record) -> DeadLetter | int:
    """The letter in a record of `dead-letters`, or the number of the one that a mark names.

    A record of another kind is a letter that lay nowhere.
    """
    headers = {name: value.decode(errors="replace") for name, value in record.headers}
    if headers.get(RETRIED, "").isdigit():
        return int(headers[RETRIED])
    return DeadLetter(
        record.offset,
        record.timestamp,
        (
            headers.get(f"{WHY}topic", ""),
            _number(headers.get(f"{WHY}partition", "")),
            _number(headers.get(f"{WHY}offset", "")),
        ),
        headers.get(f"{WHY}exception.message", "written here by another program"),
        headers.get(f"{WHY}connector.name", ""),
        record.key or b"",
        record.value or b"",
        [one for one in record.headers if not one[0].startswith(WHY) and one[0] != RETRY_OF],
    )


async def list_kinds(log: EventLog, patience: Patience) -> list[Kind]:
    """All letters, by topic and reason; the newest kind last."""
    kinds: dict[tuple[str, str], Kind] = {}
    kind_of: dict[int, Kind] = {}
    async for one in _read_all(log, patience):
        if isinstance(one, int):
            if one in kind_of:
                kind_of[one].retried += 1
            continue
        key = (one.origin[0], one.reason)
        if key not in kinds and len(kinds) >= MAX_KINDS:
            key = ("", "other reasons")
        kind = kind_of[one.number] = kinds.setdefault(key, Kind(*key))
        kind.count += 1
        kind.last_at = max(kind.last_at, one.at)
        if len(kind.first) < SHOWN_IDS:
            kind.first.append(one.number)
    return sorted(kinds.values(), key=lambda kind: kind.last_at)


async def find_dead_letter(log: EventLog, number: int, patience: Patience) -> DeadLetter:
    """Letter `number`. UsageError where there is none."""
    at = _place(log.topics)
    async with aclosing(read_records(log.broker, {at: (number, number + 1)}, patience)) as records:
        async for record in records:
            dead_letter = read_dead_letter(record)
            if isinstance(dead_letter, DeadLetter):
                return dead_letter
            raise UsageError(f"{number} is no letter, but the mark that {dead_letter} was put back")
    first, end = (await log.broker.ends([at]))[at]
    there = f"holds {first} to {end - 1}" if first < end else "is empty"
    raise UsageError(f"no dead letter {number}: {at.topic} {there}")


async def why_not(log: EventLog, dead_letter: DeadLetter) -> str:
    """Why a letter can't be put back now; empty where it can."""
    refused = refuse_topic(log.topics, dead_letter.origin[0])
    if refused:
        return refused
    lay = Partition(dead_letter.origin[0], dead_letter.origin[1])
    record = Record(
        lay,
        dead_letter.origin[2],
        dead_letter.at,
        dead_letter.key,
        dead_letter.value,
        dead_letter.headers,
    )
    try:
        event = (await log.decode(record)).event
    except DecodeError as error:
        return f"it still does not decode: {error.reason}"
    return refuse_event(event, dead_letter.key, now())


def refuse_topic(topics: Topics, topic: str) -> str:
    """Why a topic takes no letter back; empty where it does."""
    try:
        placed = topics.by_name(topic)
    except KeyError:
        return f"{topic or 'cluster it lay'} is no topic of {topics.namespace}"
    return REFUSED.get(placed.topic.name, "")


def refuse_event(event: Event, key: bytes, now_s: float) -> str:
    """Why an event would be of no use where it lay, or harm; empty where it may go back."""
    if key != event.key:
        return (
            f"its key is {key!r}, but that of {type(event).__name__} {event.event_id} is "
            f"{event.key!r}: in another partition nobody looks for it"
        )
    if isinstance(event, GenerationRequested | ActionRequested) and event.expires_at <= now_s * 1e3:
        return "it has expired: whoever asked no longer waits for the answer"
    return ""


async def retry(
    log: EventLog, numbers: Collection[int] | None, patience: Patience
) -> AsyncGenerator[Retry]:
    """Puts letters back, in their order; None is all of them. Each says what came of it.

    UsageError where a number is no letter's, before anything is put back. Fenced where another
    process does the same.
    """
    if numbers is not None:
        for number in sorted(set(numbers)):
            await find_dead_letter(log, number, patience)
    writer = await log.broker.fenced(f"{log.topics.namespace}.dead-letters")
    try:
        # Only now is what was put back known for certain: nobody else puts any back from here on.
        done = await _redrive(log, patience)
        async for dead_letter in _read_all(log, patience):
            if isinstance(dead_letter, int) or not (
                numbers is None or dead_letter.number in numbers
            ):
                continue
            refused = await why_not(log, dead_letter)
            if dead_letter.origin in done:
                refused = f"it was put back already, as letter {done[dead_letter.origin]}"
            if not refused:
                await writer.write(outgoing(log.topics, dead_letter))
                done[dead_letter.origin] = dead_letter.number
            yield Retry(dead_letter.number, dead_letter.origin, refused)
    finally:
        await writer.close()


def outgoing(topics: Topics, dead_letter: DeadLetter) -> list[Outgoing]:
    """The record as it was, and the mark that it was put back."""
    dead_letters = topics.name(DEAD_LETTERS)
    back = f"{dead_letters}/0@{dead_letter.number}".encode()
    mark = [(RETRIED, str(dead_letter.number).encode())]
    return [
        Outgoing(
            dead_letter.origin[0],
            dead_letter.key,
            dead_letter.value,
            [*dead_letter.headers, (RETRY_OF, back)],
        ),
        Outgoing(dead_letters, dead_letter.key, b"", mark),
    ]


async def _redrive(log: EventLog, patience: Patience) -> dict[Origin, int]:
    """Where letters lay that were put back, each with its number.

    Several readers may have parked one record: it is put back once.
    """
    origins: dict[int, Origin] = {}
    done: dict[Origin, int] = {}
    async for one in _read_all(log, patience):
        if isinstance(one, DeadLetter):
            origins[one.number] = one.origin
        elif one in origins:
            done[origins[one]] = one
    return done


async def _read_all(log: EventLog, patience: Patience) -> AsyncGenerator[DeadLetter | int]:
    async with aclosing(read_records(log.broker, {_place(log.topics): WHOLE}, patience)) as records:
        async for record in records:
            yield read_dead_letter(record)


def _place(topics: Topics) -> Partition:
    return topics.partition(DEAD_LETTERS)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def dead_letter_tree(dead_letter: DeadLetter, refused: str) -> dict[str, Any]:
    """A letter for JSON: bytes as hex, and as text where they are UTF-8."""
    return {
        "letter": dead_letter.number,
        "at": dead_letter.at,
        "from": place(dead_letter.origin),
        "reason": dead_letter.reason,
        "reader": dead_letter.reader,
        "headers": {name: text(value) for name, value in dead_letter.headers},
        "key": dead_letter.key.hex(),
        "value": dead_letter.value.hex(),
        "text": text(dead_letter.value),
        "refused": refused,
    }


def text(data: bytes) -> str | None:
    """Bytes as text; None where they are no UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
