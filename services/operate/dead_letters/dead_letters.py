"""Reads dead letters, and redrives them: writes them back into their topics.

A dead letter can be redriven once its bytes decode, because the registry has its schema by now or a
bug is fixed. It is written back as it was, with its key, value and headers. The record, a mark in
`dead-letters` that names the dead letter, and a record in `audit` are one transaction, and only one
process at a time can write such transactions. So a dead letter is redriven once, whatever fails and
whoever else tries.

Anybody who may write `dead-letters` can write a record that looks like a dead letter. So a dead
letter is compared with the record that it names, and not redriven if that is gone or different.

Some topics don't take a dead letter back: a late copy would be wrong if the location or the order
of the records matters, or if only one fenced service decides what to write there. REFUSED gives
the reasons.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.errors import DecodeError, RecordsLost, UsageError
from headrace.schemas.events import ActionRequested, Event, GenerationRequested
from headrace.schemas.topics import (
    AUDIT,
    BATCHES,
    DEAD_LETTERS,
    EPISODES,
    ITEMS,
    LIMITS,
    LOADS,
    POLICIES,
    QUOTAS,
    RUNS,
    SHARES,
    TRAJECTORIES,
    WAITING,
    Topics,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import (
    MAX_MESSAGE_BYTES,
    Headers,
    Outgoing,
    Partition,
    Position,
    Record,
)
from headrace.services.log.dead_letter import WHY
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, OffsetRange, Patience, read_records
from headrace.services.operate.audit.audit_trail import operation
from headrace.services.operate.dead_letters.dead_letter_count import (
    DeadLetterCount,
    DeadLetterKind,
)

REDRIVE_OF = "headrace.retry_of"
"""Header of a redriven record: the location of the dead letter."""
REDRIVEN = "headrace.retried"
"""Header of a mark in `dead-letters`: the number of the dead letter that was redriven."""

RECENT = 10_000
"""Offsets of `dead-letters` that `count_open` reads. A dead letter may have a megabyte."""

REFUSED = {
    RUNS.name: "only `headrace apply` and `headrace run` write the state of a run, and its order "
    "matters",
    QUOTAS.name: "a later one of the tenant may have replaced it. `headrace quota` sets it again",
    AUDIT.name: "nothing needs it again: `headrace audit` shows it at its old location",
    WAITING.name: "only the scheduler writes this topic, and its newest record counts",
    LIMITS.name: "a later one of the limit may have replaced it. `headrace quota` sets it again",
    EPISODES.name: "only the scheduler writes this topic, and it starts each sample once",
    TRAJECTORIES.name: "an outcome refers to a trajectory by its location, and a copy would have "
    "another one. Once the record decodes, readers find it at its old location",
    ITEMS.name: "only item-statistics writes this topic, and its newest record of an item counts",
    BATCHES.name: "only assemble-batches writes this topic, and its order is the order of training",
    LOADS.name: "a later report of the worker has replaced it",
    SHARES.name: "only the scheduler writes this topic, and the newest division of a limit counts",
    POLICIES.name: "only the trainer writes this topic, in the order of the versions",
}
"""The topics that don't take a dead letter back, and the reasons."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that a consumer could not decode. Its number is its offset in `dead-letters`."""

    number: int
    at: float
    """When it was written to `dead-letters`, in epoch seconds."""
    topic: str
    """The topic of the record, and below its partition and offset there."""
    partition: int
    offset: int
    reason: str
    reader: str
    """The consumer that could not decode it."""
    key: bytes
    value: bytes
    headers: Headers
    """The record's own headers."""

    @property
    def location(self) -> str:
        """The location of the record, as `headrace show` takes it."""
        return f"{self.topic}/{self.partition}@{self.offset}"

    def to_tree(self, refused: str) -> dict[str, Any]:
        """Returns it as JSON values: bytes as hex, and also as text if they are UTF-8."""
        return {
            "number": self.number,
            "at": self.at,
            "from": self.location,
            "reason": self.reason,
            "reader": self.reader,
            "headers": {name: text(value) for name, value in self.headers},
            "key": self.key.hex(),
            "value": self.value.hex(),
            "text": text(self.value),
            "refused": refused,
        }


def read_dead_letter(record: Record) -> DeadLetter | int:
    """Reads a record of `dead-letters`: a dead letter, or a mark that names a redriven one.

    A record that another program wrote there is a dead letter without a location.
    """
    headers = {name: value.decode(errors="replace") for name, value in record.headers}
    if (redriven := _number(headers.get(REDRIVEN, ""))) is not None:
        return redriven
    return DeadLetter(
        record.offset,
        record.timestamp,
        headers.get(f"{WHY}topic", ""),
        _number(headers.get(f"{WHY}partition", "")) or 0,
        _number(headers.get(f"{WHY}offset", "")) or 0,
        headers.get(f"{WHY}exception.message", "another program wrote this record"),
        headers.get(f"{WHY}connector.name", ""),
        record.key or b"",
        record.value or b"",
        [one for one in record.headers if not one[0].startswith(WHY) and one[0] != REDRIVE_OF],
    )


async def list_kinds(log: EventLog, patience: Patience) -> list[DeadLetterKind]:
    """Counts all dead letters by topic and reason. The kind with the newest one is last."""
    return (await _count(_read(log, WHOLE, patience))).kinds()


async def count_open(log: EventLog, recent: int = RECENT) -> tuple[int, int]:
    """Returns how many dead letters are open, and how many were redriven.

    It reads the last `recent` offsets. All records before them count as open.
    """
    at = log.topics.partition(DEAD_LETTERS)
    first, end = (await log.broker.ends([at]))[at]
    start = max(first, end - recent)
    count = await _count(_read(log, (start, end)))
    return start - first + count.waiting, sum(kind.redriven for kind in count.kinds())


async def _count(found: AsyncGenerator[DeadLetter | int]) -> DeadLetterCount:
    count = DeadLetterCount()
    async for one in found:
        if isinstance(one, int):
            count.on_redriven(one)
        else:
            count.on_dead_letter(one.number, one.location, one.topic, one.reason, one.at)
    return count


async def find_dead_letter(log: EventLog, number: int) -> DeadLetter:
    """Reads dead letter `number`. Raises UsageError if there is none."""
    at = log.topics.partition(DEAD_LETTERS)
    record = await _record_at(log, at, number)
    if record is not None:
        found = read_dead_letter(record)
        if isinstance(found, DeadLetter):
            return found
        raise UsageError(
            f"{number} is not a dead letter. It records that dead letter {found} was redriven"
        )
    first, end = (await log.broker.ends([at]))[at]
    held = f"{at.topic} holds {first} to {end - 1}" if first < end else f"{at.topic} is empty"
    raise UsageError(f"there is no dead letter {number}: {held}")


async def refusal(log: EventLog, dead_letter: DeadLetter, original: Record | None) -> str:
    """Says why a dead letter can't be redriven now; returns an empty string if it can.

    `original` is the record that it names, as `find_original` found it.
    """
    if refused := refuse_topic(log.topics, dead_letter.topic):
        return refused
    if original is None:
        return (
            f"{dead_letter.location} is no longer in the log, so nothing shows that it held this. "
            "Write the event again by its own source"
        )
    if (original.key or b"", original.value or b"") != (dead_letter.key, dead_letter.value):
        return (
            f"it is not what {dead_letter.location} holds: another program wrote it, or the record "
            "was too large for a dead letter"
        )
    if _redriven_record(log.topics, dead_letter.number, original).size > MAX_MESSAGE_BYTES:
        return "its headers are too large to be written again"
    try:
        event = (await log.decode(original)).event
    except DecodeError as error:
        return f"it still does not decode: {error.reason}"
    return refuse_event(event, dead_letter.key, now())


async def find_original(log: EventLog, dead_letter: DeadLetter) -> Record | None:
    """Reads the record that a dead letter names. Returns None if it is not in the log.

    Raises DependencyError if the brokers do not give it.
    """
    at = Partition(dead_letter.topic, dead_letter.partition)
    if not any(at in topic.all_partitions() for topic in log.topics):
        return None
    return await _record_at(log, at, dead_letter.offset)


async def _record_at(log: EventLog, at: Partition, offset: int) -> Record | None:
    """Reads a record. Returns None if the log does not hold it."""
    first, end = (await log.broker.ends([at]))[at]
    if not first <= offset < end:
        return None
    try:
        [record] = await log.broker.fetch([Position(at, offset)])
    except RecordsLost:
        return None
    return record


def refuse_topic(topics: Topics, topic: str) -> str:
    """Says why a topic takes no dead letter back; returns an empty string if it does."""
    try:
        return REFUSED.get(topics.by_name(topic).topic.name, "")
    except KeyError:
        if not topic:
            return "it does not say which topic it comes from"
        return f"{topic} is not a topic of {topics.namespace}"


def refuse_event(event: Event, key: bytes, now_s: float) -> str:
    """Says why an event would be useless or harmful now; returns an empty string if it is not."""
    if key != event.key:
        return (
            f"its key is {key!r}, but the key of {type(event).__name__} {event.event_id} is "
            f"{event.key!r}, so it would be in the wrong partition and nothing would find it"
        )
    if isinstance(event, GenerationRequested | ActionRequested) and event.expires_at <= now_s * 1e3:
        return "it has expired, and the agent no longer waits for the answer"
    return ""


async def redrive(
    log: EventLog, numbers: Collection[int] | None, patience: Patience
) -> AsyncGenerator[tuple[DeadLetter, str]]:
    """Redrives these dead letters in their order, or all if None.

    Yields each with the reason why it was refused, which is empty if it was redriven. Raises
    UsageError before it redrives any if a number is not a dead letter's. Raises Fenced if another
    process redrives dead letters at the same time.
    """
    for number in sorted(set(numbers or ())):
        await find_dead_letter(log, number)
    writer = await log.broker.fenced(f"{log.topics.namespace}.dead-letters")
    try:
        # Read this only now: from here on no other process can redrive.
        done = await _redriven(log, patience)
        async for one in _read(log, WHOLE, patience):
            if isinstance(one, int) or (numbers is not None and one.number not in numbers):
                continue
            original = await find_original(log, one)
            refused = await refusal(log, one, original)
            if one.location in done:
                refused = f"it was redriven already, as dead letter {done[one.location]}"
            if original is not None and not refused:
                recorded = operation("redrive", one.location, f"dead letter {one.number}")
                records = _outgoing(log.topics, one.number, original)
                await writer.write([*records, log.outgoing(recorded)])
                done[one.location] = one.number
            yield one, refused
    finally:
        await writer.close()


def _outgoing(topics: Topics, number: int, original: Record) -> list[Outgoing]:
    """Makes the record as it was, and the mark that its dead letter was redriven."""
    record = _redriven_record(topics, number, original)
    mark = [(REDRIVEN, str(number).encode())]
    return [record, Outgoing(topics.name(DEAD_LETTERS), record.key, b"", mark)]


def _redriven_record(topics: Topics, number: int, original: Record) -> Outgoing:
    header = (REDRIVE_OF, f"{topics.name(DEAD_LETTERS)}/0@{number}".encode())
    headers = [*original.headers, header]
    return Outgoing(original.partition.topic, original.key or b"", original.value or b"", headers)


async def _redriven(log: EventLog, patience: Patience) -> dict[str, int]:
    """Reads the locations of the records that were redriven, and the dead letter of each.

    Several consumers may have written a dead letter of one record, which is redriven only once.
    """
    locations: dict[int, str] = {}
    done: dict[str, int] = {}
    async for one in _read(log, WHOLE, patience):
        if isinstance(one, DeadLetter):
            locations[one.number] = one.location
        elif one in locations:
            done[locations[one]] = one
    return done


async def _read(
    log: EventLog, offsets: OffsetRange, patience: Patience | None = None
) -> AsyncGenerator[DeadLetter | int]:
    at = log.topics.partition(DEAD_LETTERS)
    async with aclosing(read_records(log.broker, {at: offsets}, patience)) as records:
        async for record in records:
            yield read_dead_letter(record)


def _number(text: str) -> int | None:
    """Reads a number of a header, which any program may have written. Returns None if it is none.

    `isdigit` is true for characters that `int` refuses, and `int` refuses very long numbers.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def text(data: bytes) -> str | None:
    """Decodes bytes as UTF-8; returns None if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
