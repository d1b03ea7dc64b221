"""Counts the values in an Avro body before anything is decoded from it.

One byte may stand for an item that takes hundreds of bytes as a Python object, so a record within
the size limit could take gigabytes of memory. A large body is therefore first read value by value,
with the schema of its writer, and nothing is kept but the count. This follows the binary encoding
of the Avro specification (https://avro.apache.org/docs/1.12.0/specification/#binary-encoding).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

UNCOUNTED_BYTES = 64 * 1024
"""A body up to this size is not counted: it can't hold too many values."""
MAX_VALUES = 200_000
"""Maximum number of values in a record. Each item, map entry, field and record counts as one."""

Skip = Callable[["_Cursor"], None]
"""Skips one value of a type and counts the values in it."""
_WIDTHS = {"null": 0, "boolean": 1, "float": 4, "double": 8}


class TooManyValues(Exception):
    """A body holds more than MAX_VALUES values."""


def value_counter(parsed: Any) -> Callable[[bytes, int], int]:
    """Returns a function that counts the values of a body in some bytes, from an offset on.

    `parsed` is the body's schema, as fastavro parsed it. The function stops at bytes that don't fit
    the schema, because the reader reports what is wrong with them. It raises TooManyValues as soon
    as it has counted more than MAX_VALUES.
    """
    skip = _compile(parsed, {})

    def count_values(value: bytes, begin: int) -> int:
        cursor = _Cursor(value, begin)
        # The body is cut short, or has a branch that its union lacks: the reader stops there too.
        with suppress(IndexError, OverflowError):
            skip(cursor)
        return cursor.values

    return count_values


class _Cursor:
    """An offset in the bytes, and how many values lie before it."""

    __slots__ = ("offset", "value", "values")

    def __init__(self, value: bytes, offset: int) -> None:
        self.value = value
        self.offset = offset
        self.values = 0

    def count(self) -> None:
        """Counts one more value."""
        self.values += 1
        if self.values > MAX_VALUES:
            raise TooManyValues

    def number(self) -> int:
        """Reads a long: zigzag, seven bits in each byte, lowest bits first."""
        result = shift = 0
        while True:
            byte = self.value[self.offset]
            self.offset += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (result >> 1) ^ -(result & 1)
            shift += 7
            if shift > 63:
                raise OverflowError

    def skip(self, size: int) -> None:
        """Skips `size` bytes. Raises IndexError if there are fewer."""
        if size < 0 or size > len(self.value) - self.offset:
            raise IndexError
        self.offset += size


def _compile(schema: Any, named: dict[str, Skip]) -> Skip:
    """Returns how to skip a value of a type. `named` holds the named types defined so far."""
    if isinstance(schema, list):
        return _union([_compile(branch, named) for branch in schema])
    if isinstance(schema, str):
        return named[schema] if schema in named else _primitive(schema)
    match schema["type"]:
        case "record":
            skip = _record([_compile(field["type"], named) for field in schema["fields"]])
        case "enum":
            skip = _primitive("int")
        case "fixed":
            skip = _fixed(schema["size"])
        case "array":
            return _blocks(_compile(schema["items"], named))
        case "map":
            return _blocks(_record([_primitive("string"), _compile(schema["values"], named)]))
        case inner:
            return _compile(inner, named)
    named[schema["name"]] = skip
    return skip


def _primitive(name: str) -> Skip:
    if name in _WIDTHS:
        return _fixed(_WIDTHS[name])

    def number(cursor: _Cursor) -> None:
        cursor.count()
        cursor.number()

    def text(cursor: _Cursor) -> None:
        cursor.count()
        cursor.skip(cursor.number())

    return number if name in ("int", "long") else text


def _fixed(size: int) -> Skip:
    def skip(cursor: _Cursor) -> None:
        cursor.count()
        cursor.skip(size)

    return skip


def _record(fields: list[Skip]) -> Skip:
    def skip(cursor: _Cursor) -> None:
        cursor.count()
        for field in fields:
            field(cursor)

    return skip


def _union(branches: list[Skip]) -> Skip:
    def skip(cursor: _Cursor) -> None:
        index = cursor.number()
        if index < 0:
            raise IndexError
        branches[index](cursor)

    return skip


def _blocks(item: Skip) -> Skip:
    """An array or map: blocks of items, each after its count. A byte size follows a negative
    count."""

    def skip(cursor: _Cursor) -> None:
        while count := cursor.number():
            if count < 0:
                cursor.number()
            for _ in range(abs(count)):
                item(cursor)

    return skip
