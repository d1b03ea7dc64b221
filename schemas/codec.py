"""Encodes events as bytes and decodes them: Confluent framing around Avro.

A value is the byte 0, the writer's schema id (4 bytes, big-endian) and the Avro body. The writer of
a record may be wrong or hostile, and fastavro trusts its input. The codec therefore limits a
record's size, its writer's schema and the number of its values before it decodes anything. Every
byte must be used, and the fields are checked against their ranges. Whatever the bytes are, `decode`
raises only DecodeError.

The content of packed fields (`packed.py`) and of JSON texts is not checked.
"""

from __future__ import annotations

import functools
import io
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import fastavro
import fastavro.schema
from fastavro.read import SchemaResolutionError
from pydantic import BaseModel, ValidationError

from headrace.errors import DecodeError, TooLarge, UnknownSchema
from headrace.schemas.events import Event
from headrace.schemas.problems import problems_of
from headrace.schemas.topics import MAX_RECORD_BYTES
from headrace.schemas.untrusted.schema_check import BadSchema, check_schema
from headrace.schemas.untrusted.value_count import MAX_VALUES, UNCOUNTED_BYTES, count_values

AVRO = Path(__file__).parent / "avro"
"""The folder of the newest schema of each event."""
NAMESPACE = "headrace"
"""The Avro namespace of every record."""
MAX_FOREIGN_SCHEMAS = 1_000
"""Maximum number of writers' schemas that a codec keeps. If there are more, it drops the oldest,
which is fetched again when it is needed."""

_FRAME = struct.Struct(">bI")
_MAGIC = 0
_IGNORED = ("logicalType", "__fastavro_parsed", "__named_schemas")
"""Keys that a schema loses before it is used. Without its logical types, timestamps stay ints. The
other two are fastavro's own marks: it trusts a schema that has them, and the types they bring."""
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RecursionError,
    SchemaResolutionError,
    TypeError,
    ValueError,
)
"""What fastavro raises if bytes don't fit the schema. It has no exception of its own for that."""

E = TypeVar("E", bound=Event)
Dictify = Callable[[Any], Any]


@functools.cache
def avsc(event_type: type[Event]) -> dict[str, Any]:
    """Returns the newest Avro schema of an event, from `avro/<Event>.avsc`.

    Every call returns the same object: don't change it.
    """
    schema: dict[str, Any] = json.loads((AVRO / f"{event_type.__name__}.avsc").read_text())
    return schema


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A schema that fastavro has parsed, without logical types, so that timestamps stay ints."""

    schema: Any
    canonical: str
    """The parsing canonical form. Schemas with the same form write the same bytes."""


class Codec:
    """Encodes events with their newest schemas, and decodes them with any compatible schema.

    It is not thread-safe: use it in one event loop.
    """

    def __init__(self) -> None:
        self._ids: dict[type[Event], bytes] = {}
        self._own: dict[int, _Parsed] = {}
        self._foreign: dict[int, _Parsed | str] = {}
        """By id: a writer's schema, or why it can't be used."""

    def register(self, event_type: type[Event], schema_id: int) -> None:
        """Writes events of this type with `schema_id` from now on, the registry's id of their
        newest schema. Earlier ids can still be read."""
        self._ids[event_type] = _FRAME.pack(_MAGIC, schema_id)
        self._own[schema_id] = _own_schema(event_type)

    def add_schema(self, schema_id: int, avsc_text: str) -> None:
        """Adds the schema of a writer. It never raises: if the schema can't be used, `decode`
        refuses its records with the reason."""
        while len(self._foreign) >= MAX_FOREIGN_SCHEMAS:
            del self._foreign[next(iter(self._foreign))]
        self._foreign[schema_id] = _foreign_schema(avsc_text)

    def encode(self, event: Event) -> bytes:
        """Returns the framed bytes of an event.

        Raises KeyError if its type was not registered, and TooLarge if it has more than
        MAX_RECORD_BYTES bytes or MAX_VALUES values.
        """
        event_type = type(event)
        body = io.BytesIO()
        body.write(self._ids[event_type])
        fastavro.schemaless_writer(
            body, _own_schema(event_type).schema, _dictify(event_type)(event)
        )
        if body.tell() > MAX_RECORD_BYTES:
            raise TooLarge(
                f"{event_type.__name__} {event.event_id} has {body.tell()} bytes; a record may have"
                f" at most {MAX_RECORD_BYTES}. Put large data into the blob store"
            )
        value = body.getvalue()
        if _has_too_many_values(_own_schema(event_type), value, UNCOUNTED_BYTES):
            raise TooLarge(
                f"{event_type.__name__} {event.event_id} has more than {MAX_VALUES} values. Put"
                f" large data into the blob store"
            )
        return value

    def decode(self, event_type: type[E], value: bytes | None) -> E:
        """Returns the event in a record's value.

        Raises UnknownSchema if the writer's schema was never added, and DecodeError if anything
        else is wrong with the value.
        """
        name = event_type.__name__
        if value is None:
            raise DecodeError(f"a tombstone (a null value) is not a {name}", value)
        if len(value) > MAX_RECORD_BYTES:
            raise DecodeError(
                f"{len(value)} bytes are too many: at most {MAX_RECORD_BYTES} are read", value
            )
        if len(value) < _FRAME.size or value[0] != _MAGIC:
            raise DecodeError("no Confluent framing (byte 0 and a schema id of 4 bytes)", value)
        schema_id = _FRAME.unpack_from(value)[1]
        writer, reader = self._writer(event_type, schema_id, value), _own_schema(event_type)
        agree = writer.canonical == reader.canonical
        # By another schema, each byte may stand for thousands of values.
        if _has_too_many_values(writer, value, UNCOUNTED_BYTES if agree else 0):
            raise DecodeError(f"the {name} has more than {MAX_VALUES} values", value)
        body = io.BytesIO(value)
        body.seek(_FRAME.size)
        # If the schemas agree, fastavro reads faster without the reader's.
        resolution = None if agree else reader.schema
        try:
            fields = fastavro.schemaless_reader(body, writer.schema, resolution)
        except _UNREADABLE as error:
            what = f"{type(error).__name__}: {error}"
            raise DecodeError(f"not a {name} of schema {schema_id}: {what[:500]}", value) from error
        if body.tell() != len(value):
            raise DecodeError(f"{len(value) - body.tell()} extra bytes after the {name}", value)
        try:
            event: E = event_type.__pydantic_validator__.validate_python(fields)
        except ValidationError as error:
            raise DecodeError(f"{name}: {_explain(error)}", value) from error
        # A record has all fields, so all events of a type share the set of them: it takes 1 KiB.
        object.__setattr__(event, "__pydantic_fields_set__", _all_fields(event_type))
        return event

    def _writer(self, event_type: type[Event], schema_id: int, value: bytes) -> _Parsed:
        writer = self._own.get(schema_id) or self._foreign.get(schema_id)
        if writer is None:
            raise UnknownSchema(schema_id, value)
        if isinstance(writer, str):
            raise DecodeError(f"schema {schema_id} can't be used: {writer}", value)
        written = writer.schema["name"]
        if written.rpartition(".")[2] != event_type.__name__:
            raise DecodeError(
                f"schema {schema_id} describes {written}, not {event_type.__name__}", value
            )
        return writer


def _has_too_many_values(writer: _Parsed, value: bytes, uncounted_bytes: int) -> bool:
    if len(value) <= uncounted_bytes:
        return False
    return count_values(writer.schema, value, _FRAME.size) > MAX_VALUES


@functools.cache
def _all_fields(event_type: type[Event]) -> set[str]:
    return set(event_type.model_fields)


@functools.cache
def _own_schema(event_type: type[Event]) -> _Parsed:
    return _parse(avsc(event_type))


def _foreign_schema(avsc_text: str) -> _Parsed | str:
    try:
        return _parse(check_schema(avsc_text))
    except BadSchema as error:
        return str(error)
    except (*_UNREADABLE, fastavro.schema.SchemaParseException) as error:
        return f"{type(error).__name__}: {error}"


def _parse(schema: Mapping[str, Any]) -> _Parsed:
    parsed = fastavro.parse_schema(_without_ignored(schema))
    return _Parsed(parsed, fastavro.schema.to_parsing_canonical_form(parsed))


def _without_ignored(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: value if key == "default" else _without_ignored(value)
            for key, value in schema.items()
            if key not in _IGNORED
        }
    if isinstance(schema, list):
        return [_without_ignored(part) for part in schema]
    return schema


def field_values(event: Event) -> dict[str, Any]:
    """Returns the fields of an event as fastavro's values, by name, also those of its parts.

    A part that may be null has the name of its type beside it.
    """
    fields: dict[str, Any] = _dictify(type(event))(event)
    return fields


@functools.cache
def _dictify(model: type[BaseModel]) -> Dictify:
    """Returns a function that turns an instance of a model into the dict that fastavro writes.

    It is ten times faster than `model_dump`, because it only converts fields that hold models and
    takes all others from the instance's `__dict__` as they are.
    """
    nested = {
        name: convert
        for name, field in model.model_fields.items()
        if (convert := _convert(field.annotation)) is not None
    }

    def dictify(instance: Any) -> dict[str, Any]:
        fields: dict[str, Any] = instance.__dict__.copy()
        for name, convert in nested.items():
            fields[name] = convert(fields[name])
        return fields

    return dictify


def _convert(annotation: Any) -> Dictify | None:
    """Returns the conversion of a field's value, or None if fastavro can write it as it is."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _dictify(annotation)
    for argument in get_args(annotation):
        convert = _convert(argument)
        if convert is None:
            continue
        if getattr(annotation, "__origin__", None) is tuple:
            return lambda values: [convert(value) for value in values]
        if getattr(annotation, "__origin__", None) is dict:
            return lambda values: {key: convert(value) for key, value in values.items()}
        # With the name of its type, fastavro need not try which type of the union a value has.
        name = f"{NAMESPACE}.{argument.__name__}"
        return lambda value: None if value is None else (name, convert(value))
    return None


def _explain(error: ValidationError) -> str:
    first, *others = problems_of(error)
    more = f" and {len(others)} more" if others else ""
    return f"{first}{more}"[:500]
