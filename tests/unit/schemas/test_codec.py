"""Events to bytes and back, and what hostile bytes and strangers' schemas may do: nothing."""

from __future__ import annotations

import io
import json
import types
import typing
from typing import Any, Literal, Union, get_args, get_origin

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from headrace.errors import DecodeError, TooLarge, UnknownSchema
from headrace.schemas.codec import MAX_FOREIGN_SCHEMAS, Codec, avsc
from headrace.schemas.events import (
    EVENTS,
    I32,
    I64,
    N31,
    N63,
    BatchAssembled,
    EpisodeEnded,
    Event,
    Failure,
    Fixed16,
    Fixed32,
    GroupClosed,
    Millis,
    Run,
    RunStateEntered,
    TaskEnded,
    Version,
    WaitingRecorded,
    Weight,
)
from headrace.schemas.number_runs import pack_numbers
from headrace.schemas.topics import MAX_RECORD_BYTES

LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (I32, st.integers(-(2**31), 2**31 - 1)),
    (I64, st.integers(-(2**63), 2**63 - 1)),
    (N31, st.integers(0, 2**31 - 1)),
    (N63, st.integers(0, 2**63 - 1)),
    (Version, st.integers(0, 2**31 - 1)),
    (Millis, st.integers(0, 2**63 - 1)),
    (Fixed16, st.binary(min_size=16, max_size=16)),
    (Fixed32, st.binary(min_size=32, max_size=32)),
    (Weight, st.floats(0, 1e6, exclude_min=True)),
    (float, st.floats(allow_nan=False)),
    (bool, st.booleans()),
    (str, st.text(max_size=8)),
    (bytes, st.binary(max_size=12)),
]


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    for leaf, strategy in LEAVES:
        if hint == leaf:
            return strategy
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return models(hint)
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Literal:
            return st.sampled_from(arguments)
        case origin if origin in (Union, types.UnionType):
            return st.none() | values(arguments[0])
        case origin if origin is tuple:
            return st.lists(values(arguments[0]), max_size=2).map(tuple)
        case origin if origin is dict:
            return st.dictionaries(values(str), values(arguments[1]), max_size=2)
    raise TypeError(hint)


def models(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    """Any instance of a model, defaults left out at times."""
    hints = typing.get_type_hints(model, include_extras=True)
    fields = {name: values(hints[name]) for name in model.model_fields}
    if model is BatchAssembled:  # its marks and runs must fit together
        fields["low_mark"] = st.integers(0, 9)
        fields["decided"] = st.sampled_from([(), (Run(first=10, last=2**62),)])
    if model is WaitingRecorded:  # and so must its runs
        packed = st.sampled_from([(0, 0, b""), (3, *pack_numbers([5, 6, 9]))])
        made = st.tuples(values(str), values(Millis), packed)
        return made.map(lambda one: _waiting(*one))
    required = {name: fields.pop(name) for name in list(fields) if _required(model, name)}
    return st.fixed_dictionaries(required, optional=fields).map(lambda kept: model(**kept))


def _waiting(topic: str, recorded_at: int, packed: tuple[int, int, bytes]) -> WaitingRecorded:
    count, low, waiting = packed
    return WaitingRecorded(
        topic=topic, recorded_at=recorded_at, end=10, count=count, low=low, waiting=waiting
    )


def _required(model: type[BaseModel], name: str) -> bool:
    return model.model_fields[name].is_required()


def codec() -> Codec:
    made = Codec()
    for schema_id, event_type in enumerate(EVENTS, start=1):
        made.register(event_type, schema_id)
    return made


def ended(**changes: Any) -> TaskEnded:
    outcome = EpisodeEnded(task=7, sample=0, item_id="i", ending="finished")
    fields = {"task": 7, "source": "s", "task_id": "t", "item_id": "i", "closed_by": "all"}
    return TaskEnded.model_validate({**fields, "outcomes": (outcome,), **changes})


def framed(schema_id: int, schema: dict[str, Any], fields: dict[str, Any]) -> bytes:
    body = io.BytesIO()
    body.write(b"\0" + schema_id.to_bytes(4, "big"))
    fastavro.schemaless_writer(body, schema, fields)
    return body.getvalue()


def small(fields: list[dict[str, Any]], name: str = "RunStateEntered") -> dict[str, Any]:
    """A stranger's schema with the required fields of RunStateEntered, and others."""
    state = {
        "type": "enum",
        "name": "RunStateEnteredState",
        "symbols": ["started", "ending", "ended"],
    }
    return {
        "type": "record",
        "name": name,
        "namespace": "headrace",
        "fields": [
            {"name": "namespace", "type": "string"},
            {"name": "state", "type": state},
            {"name": "digest", "type": {"type": "fixed", "name": "Fixed32", "size": 32}},
            *fields,
        ],
    }


MINIMAL = {"namespace": "n", "state": "ended", "digest": bytes(32)}


@pytest.mark.parametrize("event_type", EVENTS, ids=lambda event_type: event_type.__name__)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_event_returns_as_it_was(event_type: type[Event], data: st.DataObject) -> None:
    event = data.draw(models(event_type))
    assert codec().decode(event_type, codec().encode(event)) == event


@settings(max_examples=30, deadline=None)
@given(event=models(GroupClosed))
def test_a_plain_avro_reader_sees_the_same_fields(event: GroupClosed) -> None:
    value = codec().encode(event)
    schema = json.loads(json.dumps(avsc(GroupClosed)).replace("timestamp-millis", "none"))
    read = fastavro.schemaless_reader(io.BytesIO(value[5:]), schema, None)
    assert value[:1] == b"\0"
    assert GroupClosed.model_validate(read) == event


@settings(max_examples=300, deadline=None)
@given(
    event_type=st.sampled_from(EVENTS),
    schema_id=st.integers(0, len(EVENTS) + 1),
    body=st.binary(max_size=200),
)
def test_any_bytes_give_an_event_or_a_decode_error(
    event_type: type[Event], schema_id: int, body: bytes
) -> None:
    value = b"\0" + schema_id.to_bytes(4, "big") + body
    _event_or_decode_error(event_type, value)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_events_give_an_event_or_a_decode_error(data: st.DataObject) -> None:
    value = bytearray(codec().encode(ended(outcomes=[data.draw(models(EpisodeEnded))])))
    for _ in range(data.draw(st.integers(1, 4))):
        value[data.draw(st.integers(5, len(value) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(value)))
    _event_or_decode_error(TaskEnded, bytes(value))
    _event_or_decode_error(TaskEnded, bytes(value[:cut]))


def _event_or_decode_error(event_type: type[Event], value: bytes) -> None:
    try:
        event = codec().decode(event_type, value)
    except DecodeError as error:
        refused = error
    else:
        assert isinstance(event, event_type)
        return
    assert refused.value is value
    assert refused.reason


@pytest.mark.parametrize("number", [2**62, 2**63 - 1, -(2**63), -(2**62), -1, 1 << 31])
@pytest.mark.parametrize("name", ["namespace", "recipe", "versions"])
def test_vast_lengths_are_refused(number: int, name: str) -> None:
    """The length of a string or the block count of a map, and no data behind it."""
    zigzag = (number << 1) ^ (number >> 63)
    varint = bytearray()
    while zigzag > 0x7F:
        varint.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    varint.append(zigzag)
    before = {"namespace": b"", "recipe": b"\2n\0", "versions": b"\2n\0\0" + bytes(32) + b"\0"}
    for behind in (b"", b"\2", bytes(16)):
        value = b"\0\0\0\0\1" + before[name] + varint + behind
        _event_or_decode_error(RunStateEntered, value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is not a TaskEnded"),
        (b"", "no Confluent framing"),
        (b"\1\0\0\0\1", "no Confluent framing"),
        (bytes(MAX_RECORD_BYTES + 1), "at most 8388608 are read"),
        (b"\0\0\0\0\1", "schema 1 describes headrace.RunStateEntered, not TaskEnded"),
    ],
    ids=["tombstone", "empty", "magic", "too large", "another event"],
)
def test_what_is_no_event_says_why(value: bytes | None, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        codec().decode(TaskEnded, value)


def test_every_byte_must_be_read() -> None:
    value = codec().encode(ended())
    with pytest.raises(DecodeError, match="1 extra bytes after the TaskEnded"):
        codec().decode(TaskEnded, value + b"\0")


def test_values_out_of_range_are_refused_by_field() -> None:
    schema = avsc(EpisodeEnded)
    fields = EpisodeEnded(task=1, sample=1, item_id="i", ending="finished").model_dump()
    value = framed(EVENTS.index(EpisodeEnded) + 1, schema, fields | {"sample": 2**40})
    with pytest.raises(DecodeError, match="sample: Input should be less than 2147483648"):
        codec().decode(EpisodeEnded, value)


def test_an_event_beyond_the_limit_is_not_written() -> None:
    with pytest.raises(TooLarge, match="at most 8388608"):
        codec().encode(ended(source="x" * MAX_RECORD_BYTES))


def test_optional_records_are_written() -> None:
    failure = Failure(origin="infrastructure", code="expired", retryable=True)
    outcome = EpisodeEnded(task=7, sample=0, item_id="i", ending="failed", failure=failure)
    event = ended(outcomes=(outcome,))
    assert codec().decode(TaskEnded, codec().encode(event)) == event


def test_an_unknown_writer_is_named_then_read_once_its_schema_is_known() -> None:
    reading = codec()
    schema = small([{"name": "added_later", "type": "string"}])
    value = framed(900, schema, {**MINIMAL, "added_later": "x"})
    with pytest.raises(UnknownSchema) as raised:
        reading.decode(RunStateEntered, value)
    assert raised.value.schema_id == 900
    reading.add_schema(900, json.dumps(schema))
    assert reading.decode(RunStateEntered, value) == RunStateEntered(
        namespace="n", state="ended", digest=bytes(32)
    )


def test_a_writer_without_a_namespace_is_read() -> None:
    reading = codec()
    schema = small([])
    del schema["namespace"]
    reading.add_schema(900, json.dumps(schema))
    assert reading.decode(RunStateEntered, framed(900, schema, MINIMAL)).state == "ended"


def test_a_schema_that_changes_under_its_id_takes_effect() -> None:
    reading = codec()
    reading.add_schema(900, "nonsense")
    value = framed(900, small([]), MINIMAL)
    with pytest.raises(DecodeError, match="schema 900 can't be used: not JSON"):
        reading.decode(RunStateEntered, value)
    reading.add_schema(900, json.dumps(small([])))
    assert reading.decode(RunStateEntered, value).state == "ended"


@pytest.mark.parametrize(
    "schema",
    [
        small([], name="Other"),
        small([{"name": "bomb", "type": {"type": "array", "items": "null"}}]),
        small([{"name": "namespace", "type": "int"}]),
        small([{"name": "odd", "type": {"type": "enum", "name": "E", "symbols": [1, {}]}}]),
        small([{"name": "reason", "type": "int"}]),
        {"type": "record", "name": "RunStateEntered", "fields": []},
    ],
    ids=["other name", "bomb", "twice", "bad symbols", "other type", "lacks fields"],
)
def test_a_strangers_schema_that_does_not_fit_is_refused(schema: dict[str, Any]) -> None:
    reading = codec()
    reading.add_schema(900, json.dumps(schema))
    value = framed(900, small([]), MINIMAL) + b"\xd0\x86\x03"
    for _ in range(2):
        with pytest.raises(DecodeError):
            reading.decode(RunStateEntered, value)


@settings(max_examples=200, deadline=None)
@given(
    schema=st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["record", "x", "int"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "name", "fields", "items", "symbols", "size", "default"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_schema_gives_an_event_or_a_decode_error(schema: Any) -> None:
    reading = codec()
    text = json.dumps(small([{"name": "reason", "type": schema}]))
    reading.add_schema(900, text)
    with pytest.raises(DecodeError):
        reading.decode(RunStateEntered, b"\0\0\0\3\x84" + bytes(3))


def test_a_strangers_schema_does_not_pass_as_parsed() -> None:
    """fastavro would take the types from the marks: an array of nulls, of any length."""
    once = {"type": "record", "name": "Once", "fields": [{"name": "x", "type": "int"}]}
    schema = small([{"name": "a", "type": once}, {"name": "b", "type": "headrace.Once"}])
    value = framed(900, schema, {**MINIMAL, "a": {"x": 1}, "b": {"x": 3}})
    bomb = {"headrace.Once": {"type": "array", "items": "null"}}
    marks = {"__fastavro_parsed": True, "__named_schemas": bomb}
    reading = codec()
    reading.add_schema(900, json.dumps(schema | marks))
    assert reading.decode(RunStateEntered, value).state == "ended"


def test_strangers_schemas_are_bounded_in_number() -> None:
    reading = codec()
    text = json.dumps(small([]))
    for schema_id in range(100, 101 + MAX_FOREIGN_SCHEMAS):
        reading.add_schema(schema_id, text)
    with pytest.raises(UnknownSchema):
        reading.decode(RunStateEntered, framed(100, small([]), MINIMAL))
    assert reading.decode(RunStateEntered, framed(101, small([]), MINIMAL)).state == "ended"


def test_a_batch_whose_marks_do_not_fit_is_no_batch() -> None:
    fields = {"policy": "p", "version": 1, "recipe": bytes(32), "seed": 0, "samples": []}
    fields |= {"sampled_tokens": 0, "low_mark": 5, "groups_read": 0, "dropped": []}
    fields |= {"reward_mean": None, "decided": [{"first": 3, "last": 9}]}
    value = framed(EVENTS.index(BatchAssembled) + 1, avsc(BatchAssembled), fields)
    with pytest.raises(DecodeError, match=r"run 3\.\.9 is empty or below the low mark 5"):
        codec().decode(BatchAssembled, value)
