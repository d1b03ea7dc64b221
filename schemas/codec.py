"""Events to bytes and back: Confluent framing around Avro.

A value is the byte 0, the writer's schema id (4 bytes, big-endian) and the Avro body. Whoever may
write to a topic may be wrong or hostile, and fastavro trusts its input. So a record's size and its
writer's schema are bounded before anything is decoded, and so is the number of its values; every
byte must be used, and fields are checked against their ranges. Whatever the bytes, `decode` raises
only DecodeError.

Not guaranteed: packed fields (`packed.py`) and JSON texts are not looked into.
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
from headrace.schemas.topics import MAX_RECORD_BYTES
from headrace.schemas.untrusted.schema_check import BadSchema, check_schema
from headrace.schemas.untrusted.weigh import MAX_VALUES, UNWEIGHED_BYTES, TooManyValues, weigher

AVRO = Path(__file__).parent / "avro"
"""The folder of the newest schema of each event."""
NAMESPACE = "headrace"
"""The Avro namespace of every record."""
MAX_FOREIGN_SCHEMAS = 1_000
"""Writers' schemas kept by one codec; beyond it the oldest is forgotten and asked for anew."""

_FRAME = struct.Struct(">bI")
_MAGIC = 0
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
"""What fastavro raises on bytes that don't fit the schema: it has no error of its own for it."""

__all__ = ["AVRO", "NAMESPACE", "Codec", "DecodeError", "TooLarge", "UnknownSchema", "avsc"]

E = TypeVar("E", bound=Event)
Dictify = Callable[[Any], Any]


@functools.cache
def avsc(event_type: type[Event]) -> dict[str, Any]:
    """The event's newest Avro schema, as `avro/<Event>.avsc` has it. Shared: don't change it."""
    schema: dict[str, Any] = json.loads((AVRO / f"{event_type.__name__}.avsc").read_text())
    return schema


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A schema made ready for fastavro, without logical types: timestamps stay ints."""

    schema: Any
    canonical: str
    """Parsing canonical form: where it is equal, so are the bytes."""
    weigh: Callable[[bytes, int], int]


@dataclass(frozen=True, slots=True)
class _Unusable:
    """Why a writer's schema can't be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to read one writer's bytes as one event. `reader` is None where both schemas agree."""

    writer: Any
    reader: Any | None
    weigh: Callable[[bytes, int], int]


class Codec:
    """Encodes with the schema ids it was given; decodes from any compatible writer's schema.

    Not thread-safe: it belongs to one event loop.
    """

    def __init__(self) -> None:
        self._ids: dict[type[Event], bytes] = {}
        self._own: dict[int, _Parsed] = {}
        self._foreign: dict[int, _Parsed | _Unusable] = {}
        self._plans: dict[tuple[type[Event], int], _Plan] = {}

    def register(self, event_type: type[Event], schema_id: int) -> None:
        """From now on events of this type are written under `schema_id`, the registry's id of
        their newest schema. Earlier ids are still read."""
        self._ids[event_type] = _FRAME.pack(_MAGIC, schema_id)
        self._own[schema_id] = _own_schema(event_type)
        self._forget_plans(schema_id)

    def add_schema(self, schema_id: int, avsc_text: str) -> None:
        """Takes a writer's schema. Never raises: records of one that can't be used are refused
        with the reason by `decode`."""
        while len(self._foreign) >= MAX_FOREIGN_SCHEMAS:
            oldest = next(iter(self._foreign))
            del self._foreign[oldest]
            self._forget_plans(oldest)
        self._foreign[schema_id] = _foreign_schema(avsc_text)
        self._forget_plans(schema_id)

    def encode(self, event: Event) -> bytes:
        """The framed bytes of an event.

        KeyError where its type was not registered, TooLarge where it exceeds MAX_RECORD_BYTES.
        """
        event_type = type(event)
        body = io.BytesIO()
        body.write(self._ids[event_type])
        fastavro.schemaless_writer(
            body, _own_schema(event_type).schema, _dictify(event_type)(event)
        )
        if body.tell() > MAX_RECORD_BYTES:
            raise TooLarge(
                f"{event_type.__name__} {event.event_id} has {body.tell()} bytes; a record has at"
                f" most {MAX_RECORD_BYTES}: put what is large into the blob store"
            )
        value = body.getvalue()
        if len(value) > UNWEIGHED_BYTES:
            try:
                _own_schema(event_type).weigh(value, _FRAME.size)
            except TooManyValues:
                raise TooLarge(
                    f"{event_type.__name__} {event.event_id} has over {MAX_VALUES} values: put what"
                    f" is large into the blob store"
                ) from None
        return value

    def decode(self, event_type: type[E], value: bytes | None) -> E:
        """The event in a record's value.

        UnknownSchema where its writer's schema was never added; DecodeError for everything else
        that is wrong with it.
        """
        name = event_type.__name__
        if value is None:
            raise DecodeError(f"a tombstone is no {name}", value)
        if len(value) > MAX_RECORD_BYTES:
            raise DecodeError(f"{len(value)} bytes; at most {MAX_RECORD_BYTES} are read", value)
        if len(value) < _FRAME.size or value[0] != _MAGIC:
            raise DecodeError("no Confluent framing: byte 0 and a schema id of 4 bytes", value)
        schema_id = _FRAME.unpack_from(value)[1]
        plan = self._plans.get((event_type, schema_id))
        if plan is None:
            plan = self._plan(event_type, schema_id, value)
        if len(value) > UNWEIGHED_BYTES:
            try:
                plan.weigh(value, _FRAME.size)
            except TooManyValues:
                raise DecodeError(f"a {name} of over {MAX_VALUES} values", value) from None
        body = io.BytesIO(value)
        body.seek(_FRAME.size)
        try:
            fields = fastavro.schemaless_reader(body, plan.writer, plan.reader)
        except _UNREADABLE as error:
            what = f"{type(error).__name__}: {error}"
            raise DecodeError(f"no {name} by schema {schema_id}: {what[:500]}", value) from error
        if body.tell() != len(value):
            raise DecodeError(f"{len(value) - body.tell()} bytes follow the {name}", value)
        try:
            event: E = event_type.__pydantic_validator__.validate_python(fields)
        except ValidationError as error:
            raise DecodeError(f"{name}: {_explain(error)}", value) from error
        return event

    def _plan(self, event_type: type[Event], schema_id: int, value: bytes) -> _Plan:
        writer = self._own.get(schema_id) or self._foreign.get(schema_id)
        if writer is None:
            raise UnknownSchema(schema_id, value)
        if isinstance(writer, _Unusable):
            raise DecodeError(f"schema {schema_id} can't be used: {writer.reason}", value)
        written = writer.schema["name"]
        if written.rpartition(".")[2] != event_type.__name__:
            raise DecodeError(
                f"schema {schema_id} is of {written}, not of {event_type.__name__}", value
            )
        ours = _own_schema(event_type)
        same = writer.canonical == ours.canonical
        plan = _Plan(writer.schema, None if same else ours.schema, writer.weigh)
        self._plans[event_type, schema_id] = plan
        return plan

    def _forget_plans(self, schema_id: int) -> None:
        self._plans = {key: plan for key, plan in self._plans.items() if key[1] != schema_id}


@functools.cache
def _own_schema(event_type: type[Event]) -> _Parsed:
    return _parse(avsc(event_type))


def _foreign_schema(avsc_text: str) -> _Parsed | _Unusable:
    try:
        return _parse(check_schema(avsc_text))
    except BadSchema as error:
        return _Unusable(str(error))
    except (*_UNREADABLE, fastavro.schema.SchemaParseException) as error:
        return _Unusable(f"{type(error).__name__}: {error}")


def _parse(schema: Mapping[str, Any]) -> _Parsed:
    parsed = fastavro.parse_schema(_without_logical_types(schema))
    canonical = fastavro.schema.to_parsing_canonical_form(parsed)
    return _Parsed(parsed, canonical, weigher(parsed))


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: value if key == "default" else _without_logical_types(value)
            for key, value in schema.items()
            if key != "logicalType"
        }
    if isinstance(schema, list):
        return [_without_logical_types(part) for part in schema]
    return schema


@functools.cache
def _dictify(model: type[BaseModel]) -> Dictify:
    """How to make a model's instance into the dict that fastavro writes.

    Ten times faster than `model_dump`: only fields that hold models are touched, and all others
    are taken as they lie in the instance's `__dict__`.
    """
    nested = {
        name: convert
        for name, field in model.model_fields.items()
        if (convert := _convert(field.annotation)) is not None
    }
    if not nested:
        return _fields
    items = tuple(nested.items())

    def dictify(instance: Any) -> dict[str, Any]:
        fields = instance.__dict__.copy()
        for name, convert in items:
            fields[name] = convert(fields[name])
        return fields  # type: ignore[no-any-return]

    return dictify


def _fields(instance: Any) -> Any:
    return instance.__dict__


def _convert(annotation: Any) -> Dictify | None:
    """The conversion of a field's value, or None where fastavro takes it as it is."""
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
        return lambda value: None if value is None else convert(value)
    return None


def _explain(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{where}: {first['msg']}{more}"[:500]
