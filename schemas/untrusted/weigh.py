"""How many values does an Avro body hold? Asked before anything is made of it.

A byte may stand for an item that takes hundreds once it is an object: a record within the size
limit could take gigabytes. So what is large is walked first, by its writer's schema, and nothing
is kept but a count. The walk follows the Avro specification's binary encoding
(https://avro.apache.org/docs/1.12.0/specification/#binary-encoding).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

UNWEIGHED_BYTES = 64 * 1024
"""A body up to this size is not walked: it can't hold too much."""
MAX_VALUES = 200_000
"""Most values of one record, each item, entry, field and record counted."""

Walk = Callable[["_Cursor"], None]
_WIDTHS = {"null": 0, "boolean": 1, "float": 4, "double": 8}


class TooManyValues(Exception):
    """A body holds more than MAX_VALUES."""


def weigher(parsed: Any) -> Callable[[bytes, int], int]:
    """For a schema as fastavro parsed it: a function of bytes and where the body begins in them.

    It returns the number of values, as far as the bytes fit the schema: what is wrong with them is
    for the reader to say. TooManyValues as soon as there are more than MAX_VALUES.
    """
    walk = _compile(parsed, {})

    def weigh(value: bytes, begin: int) -> int:
        cursor = _Cursor(value, begin)
        # Cut short, or of no such branch: the reader stops there too.
        with suppress(IndexError, OverflowError):
            walk(cursor)
        return cursor.values

    return weigh


class _Cursor:
    """A place in the bytes, and how many values lie before it."""

    __slots__ = ("place", "value", "values")

    def __init__(self, value: bytes, place: int) -> None:
        self.value = value
        self.place = place
        self.values = 0

    def count(self) -> None:
        """One value more."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise TooManyValues

    def number(self) -> int:
        """Reads a long: zigzag, seven bits a byte, the lowest first."""
        result = shift = 0
        while True:
            byte = self.value[self.place]
            self.place += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (result >> 1) ^ -(result & 1)
            shift += 7
            if shift > 63:
                raise OverflowError

    def skip(self, size: int) -> None:
        """Passes over so many bytes. IndexError where there are fewer."""
        if size < 0 or size > len(self.value) - self.place:
            raise IndexError
        self.place += size


def _compile(schema: Any, named: dict[str, Walk]) -> Walk:
    """The walk over one value of a type. `named` are the named types met so far."""
    if isinstance(schema, list):
        return _union([_compile(branch, named) for branch in schema])
    if isinstance(schema, str):
        return named[schema] if schema in named else _primitive(schema)
    match schema["type"]:
        case "record":
            walk = _record([_compile(field["type"], named) for field in schema["fields"]])
        case "enum":
            walk = _primitive("int")
        case "fixed":
            walk = _fixed(schema["size"])
        case "array":
            return _blocks(_compile(schema["items"], named))
        case "map":
            return _blocks(_record([_primitive("string"), _compile(schema["values"], named)]))
        case inner:
            return _compile(inner, named)
    named[schema["name"]] = walk
    return walk


def _primitive(name: str) -> Walk:
    if name in _WIDTHS:
        return _fixed(_WIDTHS[name])

    def number(cursor: _Cursor) -> None:
        cursor.count()
        cursor.number()

    def text(cursor: _Cursor) -> None:
        cursor.count()
        cursor.skip(cursor.number())

    return number if name in ("int", "long") else text


def _fixed(size: int) -> Walk:
    def walk(cursor: _Cursor) -> None:
        cursor.count()
        cursor.skip(size)

    return walk


def _record(fields: list[Walk]) -> Walk:
    def walk(cursor: _Cursor) -> None:
        cursor.count()
        for field in fields:
            field(cursor)

    return walk


def _union(branches: list[Walk]) -> Walk:
    def walk(cursor: _Cursor) -> None:
        index = cursor.number()
        if index < 0:
            raise IndexError
        branches[index](cursor)

    return walk


def _blocks(item: Walk) -> Walk:
    """An array or map: blocks of items, each with its count; negative where a size follows."""

    def walk(cursor: _Cursor) -> None:
        while count := cursor.number():
            if count < 0:
                cursor.number()
            for _ in range(abs(count)):
                item(cursor)

    return walk
