"""The pages of topics, records and dead letters, and the texts of single fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from headrace.errors import UsageError
from headrace.schemas.events import Turn
from headrace.schemas.topics import DAY_MS, DEAD_LETTERS, RETENTION_MS
from headrace.services.base.texts import encodable
from headrace.services.kafka.broker import Partition, Position
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import read_records
from headrace.services.log.unpacked import Texts
from headrace.services.operate.dashboard.views.cut_texts import WHOLE, Tree, text_tree
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.dashboard.views.page_of import DEFAULT, whole_number
from headrace.services.operate.dead_letters.dead_letter_count import DeadLetterKind
from headrace.services.operate.dead_letters.dead_letters import (
    DeadLetter,
    find_dead_letter,
    find_original,
    read_dead_letter,
    refusal,
    text,
)
from headrace.services.operate.namespace_topics import find_topic
from headrace.services.operate.readable import readable_record
from headrace.services.operate.show.facts import Fact
from headrace.services.operate.show.ids import RecordId, parse_id

MOST_RECORDS = 100
"""Most records of one answer."""
RECORD_CHARACTERS = 1_000_000
"""A larger record is shown without its long fields."""
PREVIEW = 400
SHOWN_BYTES = 4_096
MOST_LETTERS = 2_000
"""The newest dead letters, with the marks among them, that are listed."""


async def topics_tree(log: EventLog) -> Tree:
    """Returns the topics of the namespace in the order of the flow."""
    existing = await log.broker.list_topics()
    items = []
    for one in log.topics:
        if one.name not in existing:
            continue
        bounds = (await log.broker.ends(one.all_partitions())).values()
        kept_ms = RETENTION_MS[one.topic.kept]
        items.append(
            {
                "topic": one.name,
                "name": one.topic.name,
                "event": "bytes" if one.topic.event is None else one.topic.event.__name__,
                "policy": one.policy,
                "writer": one.topic.writer,
                "kept": f"{kept_ms // DAY_MS} days" if kept_ms >= DAY_MS else one.topic.kept,
                "partitions": one.partitions,
                "records": sum(end - first for first, end in bounds),
                "first": sum(first for first, _ in bounds),
            }
        )
    return {"items": items, "total": len(items), "next": None}


def position_of(log: EventLog, at: str) -> Position:
    """Returns the position of TOPIC/PARTITION@OFFSET. Raises UsageError if it is not one."""
    wanted = parse_id(at)
    if not isinstance(wanted, RecordId):
        raise UsageError(f"at={at[:80]!r}: write TOPIC/PARTITION@OFFSET")
    topic = find_topic(log.topics, wanted.topic)
    if wanted.partition >= topic.partitions:
        raise UsageError(f"{topic.name} has only the partitions 0 to {topic.partitions - 1}")
    return Position(Partition(topic.name, wanted.partition), wanted.offset)


async def record_tree(log: EventLog, at: str) -> Tree:
    """Returns one record as JSON values."""
    position = position_of(log, at)
    span = {position.partition: (position.offset, position.offset + 1)}
    async with aclosing(read_records(log.broker, span)) as records:
        async for record in records:
            tree = await readable_record(log, record)
            if len(json.dumps(tree["event"])) > RECORD_CHARACTERS:
                tree["event"] = {
                    name: value
                    for name, value in tree["event"].items()
                    if len(json.dumps(value)) < PREVIEW
                }
                tree["left_out"] = "the record is large: its long fields are left out"
            return {**tree, "location": at}
    raise UsageError(f"the log holds no record at {at}: it was removed, or never written")


async def records_tree(log: EventLog, query: Mapping[str, str]) -> Tree:
    """Returns the records of one partition before an offset, the newest first."""
    name, policy = query.get("topic", ""), query.get("policy", "")
    topic = find_topic(log.topics, f"{name}.{policy}" if policy else name)
    number = whole_number(query, "partition", 0, 0, topic.partitions - 1)
    limit = whole_number(query, "limit", DEFAULT, 1, MOST_RECORDS)
    at = Partition(topic.name, number)
    first, end = (await log.broker.ends([at]))[at]
    before = min(end, whole_number(query, "before", end))
    start = max(first, before - limit)
    items = []
    async with aclosing(read_records(log.broker, {at: (start, before)})) as records:
        async for record in records:
            tree = await readable_record(log, record)
            preview = json.dumps(tree.pop("event"), ensure_ascii=False)[:PREVIEW]
            location = f"{at.topic}/{at.number}@{record.offset}"
            items.append({**tree, "preview": text_tree(preview), "location": location})
    following = str(start) if start > first else None
    return {"items": items[::-1], "total": end - first, "next": following}


async def dead_letters_tree(
    log: EventLog, kinds: Sequence[DeadLetterKind], query: Mapping[str, str]
) -> Tree:
    """Returns the kinds of dead letters, and the newest letters."""
    at = log.topics.partition(DEAD_LETTERS)
    first, end = (await log.broker.ends([at]))[at]
    before = min(end, whole_number(query, "cursor", end))
    limit = whole_number(query, "limit", DEFAULT, 1, MOST_RECORDS)
    start = max(first, before - MOST_LETTERS)
    letters: list[DeadLetter] = []
    redriven: set[int] = set()
    async with aclosing(read_records(log.broker, {at: (start, end)})) as records:
        async for record in records:
            found = read_dead_letter(record)
            if isinstance(found, int):
                redriven.add(found)
            elif found.number < before:
                letters = [*letters[-limit:], found]
    newest = letters[::-1][:limit]
    following = newest[-1].number if newest and len(letters) > limit else start
    return {
        "kinds": [
            {
                "topic": one.topic,
                "reason": encodable(one.reason),
                "count": one.count,
                "redriven": one.redriven,
                "first": one.first,
                "last_at": one.last_at,
            }
            for one in kinds[::-1]
        ],
        "items": [
            {
                "number": one.number,
                "topic": encodable(one.topic),
                "reason": encodable(one.reason[:1_000]),
                "at": one.at,
                "reader": encodable(one.reader),
                "bytes": len(one.value),
                "redriven": one.number in redriven,
            }
            for one in newest
        ],
        "total": sum(one.count for one in kinds),
        "next": str(following) if following > first else None,
    }


async def dead_letter_tree(log: EventLog, number: int) -> Tree:
    """Returns one dead letter, and why it can't be redriven now."""
    letter = await find_dead_letter(log, number)
    refused = await refusal(log, letter, await find_original(log, letter))
    whole = text(letter.value)
    return {
        "number": number,
        "location": letter.location,
        "at": letter.at,
        "reason": encodable(letter.reason),
        "reader": encodable(letter.reader),
        "refused": refused,
        "key": letter.key.hex(),
        "headers": {
            encodable(name): encodable(value.decode(errors="replace"))
            for name, value in letter.headers
        },
        "value_hex": letter.value[:SHOWN_BYTES].hex(),
        "value_text": text_tree(whole),
        "bytes": len(letter.value),
    }


async def whole_text(reader: FactReader, texts: Texts, at: str, field: str) -> Tree:
    """Returns the whole text of a field. `field` is a path such as `turns.3.text`.

    Raises UsageError if the record or the field is not there.
    """
    fact = await reader.one(position_of(reader.log, at))
    if fact is None:
        raise UsageError(f"the log holds no event at {at}")
    found = _field_of(fact, field, texts)
    if found is None:
        raise UsageError(f"field={field[:80]!r}: the event at {at} has no such text")
    found = encodable(found)
    return {"text": found[:WHOLE], "length": len(found)}


def _field_of(fact: Fact[Any], field: str, texts: Texts) -> str | None:
    """Returns the text of a field, or None if it has none. Token ids of a turn are decoded."""
    value: Any = fact.event
    owner: Any = None
    for name in field.split(".")[:8]:
        owner = value
        if isinstance(value, BaseModel) and name in type(value).model_fields:
            value = getattr(value, name)
        elif isinstance(value, tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    if isinstance(owner, Turn) and isinstance(value, bytes):
        return texts.of(owner.policy, value, getattr(fact.event, "tokenizer", ""))
    return value if isinstance(value, str) else None
