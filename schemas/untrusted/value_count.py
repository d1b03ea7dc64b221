"""Counts the values in an Avro body before anything is decoded from it.

One byte may stand for an item that takes hundreds of bytes as a Python object, so a record within
the size limit could take gigabytes of memory. A large body is therefore first read value by value,
with the schema of its writer, and nothing is kept but the count. This follows the binary encoding
of the Avro specification (https://avro.apache.org/docs/1.12.0/specification/#binary-encoding).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

UNCOUNTED_BYTES = 64 * 1024
"""A body of our own schemas up to this size is not counted: it can't hold too many values."""
MAX_VALUES = 200_000
"""Maximum number of values in a record. Each item, map entry, field and record counts as one."""

_WIDTHS = {"null": 0, "boolean": 1, "float": 4, "double": 8}


def count_values(parsed: Any, value: bytes, begin: int) -> int:
    """Returns how many values the body has that begins at an offset of `value`.

    `parsed` is the record schema of the body's writer, as fastavro parsed it. The count ends at
    MAX_VALUES + 1, and at bytes that don't fit the schema, because the reader reports what is wrong
    with them.
    """
    body = _Body(value, begin, parsed["__named_schemas"])
    # IndexError: the body is cut short, or has a branch that its union lacks. OverflowError: too
    # many values, or a number of too many bytes.
    with suppress(IndexError, OverflowError):
        body.skip(parsed)
    return body.values


class _Body:
    """A body, an offset in it, and how many values lie before the offset."""

    def __init__(self, value: bytes, offset: int, named: Mapping[str, Any]) -> None:
        self.values = 0
        self._value = value
        self._offset = offset
        self._named = named

    def skip(self, schema: Any) -> None:
        """Skips one value of a type, and counts the values in it."""
        if isinstance(schema, list):
            index = self._number()
            if index < 0:
                raise IndexError
            self.skip(schema[index])
            return
        if isinstance(schema, str):
            schema = self._named.get(schema, {"type": schema})
        match schema["type"]:
            case "array":
                self._skip_items(schema["items"])
            case "map":
                entry = [{"type": "string"}, {"type": schema["values"]}]
                self._skip_items({"type": "record", "fields": entry})
            case "record":
                self._count()
                for field in schema["fields"]:
                    self.skip(field["type"])
            case "null" | "boolean" | "float" | "double" as kind:
                self._count()
                self._pass(_WIDTHS[kind])
            case "fixed":
                self._count()
                self._pass(schema["size"])
            case "int" | "long" | "enum":
                self._count()
                self._number()
            case "bytes" | "string":
                self._count()
                self._pass(self._number())
            case inner:
                self.skip(inner)

    def _skip_items(self, item: Any) -> None:
        """Skips blocks of items, each after its count. A byte size follows a negative count."""
        while count := self._number():
            if count < 0:
                self._number()
            for _ in range(abs(count)):
                self.skip(item)

    def _count(self) -> None:
        self.values += 1
        if self.values > MAX_VALUES:
            raise OverflowError

    def _number(self) -> int:
        """Reads a long: zigzag, seven bits in each byte, lowest bits first."""
        result = shift = 0
        while True:
            byte = self._value[self._offset]
            self._offset += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (result >> 1) ^ -(result & 1)
            shift += 7
            if shift > 63:
                raise OverflowError

    def _pass(self, size: int) -> None:
        """Passes `size` bytes. Raises IndexError if there are fewer."""
        if size < 0 or size > len(self._value) - self._offset:
            raise IndexError
        self._offset += size
