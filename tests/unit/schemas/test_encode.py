"""Avro bodies, byte for byte as fastavro writes them, and what can't be written."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.codec import avsc
from schemas.encode import encoder
from schemas.events import EVENTS, Event
from tests.unit.schemas.test_codec import models

DAMAGED: list[tuple[Any, Any, type[Exception]]] = [
    ("long", 2**63, OverflowError),
    ("long", -(2**63) - 1, OverflowError),
    ("long", "1", TypeError),
    ("string", "\ud800", ValueError),
    ({"type": "fixed", "name": "Two", "size": 2}, b"abc", ValueError),
    ({"type": "enum", "name": "Side", "symbols": ["left"]}, "right", KeyError),
]


def record(kind: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": "field", "type": kind}]}


@pytest.mark.parametrize("event_type", EVENTS, ids=lambda event_type: event_type.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_bytes_are_fastavros(event_type: type[Event], data: st.DataObject) -> None:
    event = data.draw(models(event_type))
    schema = json.loads(json.dumps(avsc(event_type)).replace("timestamp-millis", "none"))
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema, event.model_dump())
    assert encoder(schema)(b"prefix", event) == b"prefix" + body.getvalue()


@pytest.mark.parametrize(("kind", "value", "error"), DAMAGED)
def test_what_does_not_fit_its_type_is_not_written(
    kind: Any, value: Any, error: type[Exception]
) -> None:
    encode = encoder(record(kind))
    with pytest.raises(error):
        encode(b"", SimpleNamespace(field=value))


def test_a_union_of_several_types_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="only null and one more"):
        encoder(record(["null", "string", "long"]))
