"""Converts records and events to JSON values that people can read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel

from headrace.errors import DecodeError
from headrace.schemas.packed import unpack_f32, unpack_i32
from headrace.services.kafka.broker import Record
from headrace.services.log.dead_letter import WHY
from headrace.services.log.event_log import EventLog

_FLOATS = frozenset({"advantages", "logprobs", "teacher", "turn_rewards"})
_DIGESTS = frozenset({"digest", "recipe", "sha256", "state"})
_SHOWN_BYTES = 256
"""Bytes of an undecodable value that are shown."""


async def readable_record(log: EventLog, record: Record) -> dict[str, Any]:
    """Returns a record's location and its event, or why its value is not an event."""
    tree: dict[str, Any] = {
        "topic": record.partition.topic,
        "partition": record.partition.number,
        "offset": record.offset,
        "at": iso(record.timestamp),
    }
    try:
        event = (await log.decode(record)).event
    except DecodeError as error:
        return {**tree, "type": "undecodable", "id": "", "event": _undecodable(record, error)}
    return {**tree, "type": type(event).__name__, "id": event.event_id, "event": readable(event)}


def _undecodable(record: Record, error: DecodeError) -> dict[str, Any]:
    headers = {
        name.removeprefix(WHY): text.decode(errors="replace")
        for name, text in record.headers
        if name.startswith(WHY)
    }
    value = record.value or b""
    reason = headers or {"reason": error.reason}
    return {**reason, "value": value[:_SHOWN_BYTES].hex(), "bytes": len(value)}


def iso(at: float) -> str:
    """Formats epoch seconds as ISO 8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def readable(part: BaseModel) -> dict[str, Any]:
    """Returns an event's fields: packed arrays as lists, all other bytes as hexadecimal text."""
    return {name: _readable(name, getattr(part, name)) for name in type(part).model_fields}


def _readable(name: str, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return readable(value)
    if isinstance(value, tuple):
        return [_readable(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _readable(name, item) for key, item in value.items()}
    if not isinstance(value, bytes):
        return value
    if name in _DIGESTS or len(value) % 4:
        return value.hex()
    if name in _FLOATS:
        # NaN means that no number was given. JSON has no NaN, so null stands for it.
        return [None if number != number else round(number, 6) for number in unpack_f32(value)]
    return unpack_i32(value)
