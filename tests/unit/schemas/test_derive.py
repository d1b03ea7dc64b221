"""The schema files say what the models say, and what was ever published can still be read."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastavro
import fastavro.schema
import pytest
from fastavro.read import SchemaResolutionError
from fastavro.utils import generate_many

from headrace.schemas import derive
from headrace.schemas.attribute_docs import attribute_docs
from headrace.schemas.codec import AVRO, avsc
from headrace.schemas.events import EVENTS, Event, TrajectoryRecorded, Turn

EACH = pytest.mark.parametrize("event_type", EVENTS, ids=lambda event_type: event_type.__name__)


@EACH
def test_no_default_is_copied_for_each_event(event_type: type[Event]) -> None:
    """Pydantic copies a mutable default with `deepcopy`, which costs more than the other fields."""
    for field in event_type.model_fields.values():
        assert not isinstance(field.default, dict | list)


def read_by(reader: dict[str, Any], writer: dict[str, Any]) -> None:
    """Reads made-up records of the writer's schema by the reader's."""
    random.seed(1)
    for fields in generate_many(writer, 5):
        body = io.BytesIO()
        fastavro.schemaless_writer(body, writer, fields)
        body.seek(0)
        fastavro.schemaless_reader(body, writer, reader)


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """All fields of all records in a schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from parts(part)
    elif isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield field
            yield from parts(field["type"])
        for key in ("type", "items", "values"):
            if isinstance(schema.get(key), dict | list):
                yield from parts(schema[key])


@EACH
def test_the_file_is_the_model_s_schema(event_type: type[Event]) -> None:
    text = (AVRO / f"{event_type.__name__}.avsc").read_text()
    hint = "run python -m headrace.schemas.derive --write"
    assert text == derive.text(derive.derive(event_type)), hint
    fastavro.parse_schema(json.loads(text))


def test_there_is_no_file_without_an_event() -> None:
    names = {event_type.__name__ for event_type in EVENTS}
    assert {file.stem for file in AVRO.iterdir()} == names
    assert {file.name.partition(".")[0] for file in derive.RELEASED.iterdir()} == names


@EACH
def test_every_field_is_documented(event_type: type[Event]) -> None:
    for field in parts(avsc(event_type)):
        assert field.get("doc"), field["name"]
        if field["type"] == "bytes":
            assert field["doc"].startswith("Packed little-endian"), field["name"]


@EACH
def test_the_last_release_is_the_present_schema(event_type: type[Event]) -> None:
    files = derive.released(event_type)
    assert [file.name for file in files] == [
        f"{event_type.__name__}.v{number}.avsc" for number in range(1, len(files) + 1)
    ]
    last = fastavro.schema.to_parsing_canonical_form(json.loads(files[-1].read_text()))
    assert last == fastavro.schema.to_parsing_canonical_form(avsc(event_type))


@EACH
def test_every_release_is_read_by_all_later_schemas(event_type: type[Event]) -> None:
    schemas = [json.loads(file.read_text()) for file in derive.released(event_type)]
    for index, writer in enumerate(schemas):
        for reader in (*schemas[index + 1 :], avsc(event_type)):
            read_by(reader, writer)


def test_a_required_field_more_would_be_noticed() -> None:
    writer = avsc(TrajectoryRecorded)
    reader = {**writer, "fields": [*writer["fields"], {"name": "new", "type": "long"}]}
    with pytest.raises(SchemaResolutionError):
        read_by(reader, writer)


def test_a_class_s_docstrings_are_its_fields_docs() -> None:
    docs = attribute_docs(Turn)
    assert docs["finish"] == "Why the generation ended: `finish` of its GenerationCompleted."
    assert "id_fields" not in docs


def test_a_release_never_changes(tmp_path: Path) -> None:
    avro, folder = tmp_path / "avro", tmp_path / "released"
    assert len(derive.write(avro, folder)) == 2 * len(EVENTS)
    assert len(derive.write(avro, folder)) == len(EVENTS)
    published = folder / "TaskEnded.v1.avsc"
    schema = json.loads(published.read_text())
    published.write_text(json.dumps(schema | {"doc": "Other words."}))
    derive.write(avro, folder)
    older = json.dumps(schema | {"fields": schema["fields"][:-1]})
    published.write_text(older)
    with pytest.raises(derive.ChangedRelease, match=r"publish TaskEnded\.v2\.avsc"):
        derive.write(avro, folder)
    assert folder / "TaskEnded.v2.avsc" in derive.write(avro, folder, release=True)
    assert published.read_text() == older
