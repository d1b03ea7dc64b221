"""A record's values are counted before they are made; what holds too many is refused unmade."""

from __future__ import annotations

import json
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from headrace.errors import DecodeError, TooLarge
from headrace.schemas.codec import Codec, avsc
from headrace.schemas.events import EVENTS, Event, Exclusion, GroupClosed, TaskCancelled
from headrace.schemas.untrusted.value_count import MAX_VALUES, UNCOUNTED_BYTES, count_values
from tests.unit.schemas.test_codec import codec, framed, models

GROUP = GroupClosed(
    task=1, policy="p", item_id="i", epoch=0, verdict="dropped", estimator="grpo", ended=0
)


def counted(event_type: type[Event], body: bytes) -> int:
    text = json.dumps(avsc(event_type)).replace("timestamp-millis", "none")
    return count_values(fastavro.parse_schema(json.loads(text)), body, 0)


def values(held: Any) -> int:
    """How many values a field's content is: a map's entry is a record of its key and value."""
    if isinstance(held, BaseModel):
        return 1 + sum(values(getattr(held, name)) for name in type(held).model_fields)
    if isinstance(held, dict):
        return sum(2 + values(value) for value in held.values())
    return sum(map(values, held)) if isinstance(held, tuple) else 1


@pytest.mark.parametrize("event_type", EVENTS, ids=lambda event_type: event_type.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_value_is_counted(event_type: type[Event], data: st.DataObject) -> None:
    event = data.draw(models(event_type))
    assert counted(event_type, codec().encode(event)[5:]) == values(event)


@given(event_type=st.sampled_from(EVENTS), body=st.binary(max_size=100))
def test_bytes_that_do_not_fit_end_the_count(event_type: type[Event], body: bytes) -> None:
    assert counted(event_type, body) >= 0


def test_a_length_that_no_bytes_follow_ends_the_count() -> None:
    assert (
        counted(GroupClosed, b"\2" + b"\xff" * 9 + b"\1") == 3
    )  # the record and two of its fields
    assert counted(GroupClosed, b"\2\1") == 3  # a length of -1


def test_many_small_items_are_refused_before_they_are_made() -> None:
    items = [{"sample": 0, "reason": ""}] * MAX_VALUES
    value = framed(
        EVENTS.index(GroupClosed) + 1, avsc(GroupClosed), GROUP.model_dump() | {"excluded": items}
    )
    assert counted(GroupClosed, value[5:]) == MAX_VALUES + 1
    with pytest.raises(DecodeError, match="the GroupClosed has more than 200000 values"):
        codec().decode(GroupClosed, value)


def test_what_nobody_could_read_is_not_written() -> None:
    many = GROUP.model_copy(update={"excluded": (Exclusion(sample=0, reason=""),) * MAX_VALUES})
    with pytest.raises(TooLarge, match="more than 200000 values"):
        codec().encode(many)


def test_what_is_large_and_of_few_values_passes() -> None:
    large = GROUP.model_copy(update={"reason": "x" * (2 * UNCOUNTED_BYTES)})
    assert codec().decode(GroupClosed, codec().encode(large)) == large


def test_a_small_body_of_another_schema_is_counted_before_it_is_decoded() -> None:
    """Each byte is an item of a type that has 2,000 values and takes no more bytes."""
    nothing = {"type": "null"}
    item = {
        "type": "record",
        "name": "Item",
        "fields": [{"name": f"f{number}", "type": nothing} for number in range(2_000)],
    }
    schema = json.loads(json.dumps(avsc(TaskCancelled)))
    schema["fields"].insert(0, {"name": "items", "type": {"type": "array", "items": [item]}})
    codec = Codec()
    codec.add_schema(7, json.dumps(schema))
    count = 8_000
    block = bytes([(2 * count) & 0x7F | 0x80, (2 * count) >> 7 & 0x7F | 0x80, (2 * count) >> 14])
    value = b"\0\0\0\0\7" + block + bytes(count) + b"\0" + bytes(3) + b"\0"
    assert len(value) < UNCOUNTED_BYTES
    with pytest.raises(DecodeError, match=f"more than {MAX_VALUES} values"):
        codec.decode(TaskCancelled, value)
