"""Which strangers' schemas are refused before fastavro sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.schemas.codec import avsc
from headrace.schemas.events import EVENTS, Event
from headrace.schemas.untrusted.schema_check import MAX_SCHEMA_BYTES, BadSchema, check_schema


def record(*types: Any, name: str = "R") -> dict[str, Any]:
    fields = [{"name": f"f{index}", "type": kind} for index, kind in enumerate(types)]
    return {"type": "record", "name": name, "fields": fields}


def array(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def nested(depth: int) -> Any:
    return "int" if not depth else array(nested(depth - 1))


def doubling(levels: int) -> dict[str, Any]:
    """Each record holds the one before twice: 2**levels values in no bytes at all."""
    fields: list[Any] = [record("null", name="R0")]
    fields += [record(f"R{level}", f"R{level}", name=f"R{level + 1}") for level in range(levels)]
    return record(*fields, name="Top")


@pytest.mark.parametrize("event_type", EVENTS, ids=lambda event_type: event_type.__name__)
def test_our_own_schemas_are_safe(event_type: type[Event]) -> None:
    assert check_schema(json.dumps(avsc(event_type))) == avsc(event_type)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (record(array("null")), "array of items that may take no bytes"),
        (record({"type": "map", "values": "null"}), "map of items that may take no bytes"),
        (record(array(record(name="E"))), "array of items that may take no bytes"),
        (record(array(record("null", "null", name="E"))), "may take no bytes"),
        (record(record(name="E"), array("E")), "may take no bytes"),
        (record(array({"type": "null"})), "may take no bytes"),
        (record(array({"type": "fixed", "name": "F", "size": 0})), "may take no bytes"),
        (record({"type": "fixed", "name": "F", "size": 2**40}), "fixed F has the size"),
        (record({"type": "fixed", "name": "F", "size": True}), "fixed F has the size"),
        (record("R"), "R contains itself"),
        (record(["null", array("R")]), "R contains itself"),
        (record("Unheard"), "unknown type 'Unheard'"),
        (record(record(name="E"), record(name="E")), "E is defined twice"),
        (record(nested(40)), "nested deeper than"),
        (doubling(20), "more than 5000 types"),
        (record(7), "'7' is not a type"),
        ({"type": "record", "name": "R", "fields": ["f"]}, "no list of fields"),
        ({"type": "record", "name": "R", "fields": [{}, {}]}, "two fields of one name"),
        ({"type": "record", "fields": []}, "no name"),
        (array("int"), "not a record"),
        ("int", "not a record"),
    ],
)
def test_unsafe_schemas_are_refused(schema: Any, reason: str) -> None:
    with pytest.raises(BadSchema, match=reason):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (" " * (MAX_SCHEMA_BYTES + 1), "characters; at most"),
    ],
    ids=["cut", "deep", "long"],
)
def test_texts_that_are_no_schema_are_refused(text: str, reason: str) -> None:
    with pytest.raises(BadSchema, match=reason):
        check_schema(text)


def test_arrays_of_unions_and_of_repeated_types_are_safe() -> None:
    once = record("int", name="E")
    check_schema(json.dumps(record(once, array("E"), array(["null", "E"]))))


def test_a_reference_is_found_in_the_record_s_namespace() -> None:
    schema = record(record("int", name="E"), "E", "a.E") | {"namespace": "a"}
    check_schema(json.dumps(schema))
