"""Checks that the Avro schema of an unknown writer is safe to decode with. fastavro does not.

If an item takes no bytes, a few bytes can stand for millions of items. A schema that contains
itself can nest without end. Both are refused, and so are schemas that are very large.
"""

from __future__ import annotations

import json
from typing import Any

MAX_SCHEMA_BYTES = 1024 * 1024
MAX_NODES = 5_000
"""Maximum number of types in a schema. A reference to a named type counts as the whole type."""
MAX_DEPTH = 24
MAX_FIXED_BYTES = 1024 * 1024

_SMALLEST = {
    "null": 0,
    "boolean": 1,
    "int": 1,
    "long": 1,
    "float": 4,
    "double": 8,
    "bytes": 1,
    "string": 1,
}
"""The fewest bytes that a value of each primitive type takes."""


class BadSchema(ValueError):
    """A text is not an Avro schema, or not a safe one. The message says why."""


def check_schema(avsc_text: str) -> dict[str, Any]:
    """Returns the schema in a text.

    Raises BadSchema unless it is a self-contained record within the bounds.
    """
    if len(avsc_text) > MAX_SCHEMA_BYTES:
        raise BadSchema(f"{len(avsc_text)} characters; at most {MAX_SCHEMA_BYTES} are read")
    try:
        schema = json.loads(avsc_text)
    except (ValueError, RecursionError) as error:
        raise BadSchema(f"not JSON: {error}") from error
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise BadSchema("not a record")
    _Checker().check(schema, namespace="", depth=0)
    return schema


class _Checker:
    """Measures each type of a schema once. A reference counts as the type that it names."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[int, int, int] | None] = {}
        """Full name to (nodes, depth, fewest bytes), or None while the type is being defined."""

    def check(self, schema: Any, namespace: str, depth: int) -> tuple[int, int, int]:
        """Returns the nodes, depth and fewest bytes of a schema that is `depth` types deep."""
        if depth > MAX_DEPTH:
            raise BadSchema(f"nested deeper than {MAX_DEPTH}")
        nodes, below, smallest = self._measure(schema, namespace, depth)
        if nodes > MAX_NODES:
            raise BadSchema(f"more than {MAX_NODES} types")
        if depth + below > MAX_DEPTH:
            raise BadSchema(f"nested deeper than {MAX_DEPTH}")
        return nodes, below, smallest

    def _measure(self, schema: Any, namespace: str, depth: int) -> tuple[int, int, int]:
        if isinstance(schema, list):
            return self._sum(schema, namespace, depth, union=True)
        if isinstance(schema, str):
            if schema in _SMALLEST:
                return 1, 0, _SMALLEST[schema]
            return self._reference(schema, namespace)
        if not isinstance(schema, dict):
            raise BadSchema(f"{str(schema)[:80]!r} is not a type")
        match schema.get("type"):
            case "record":
                return self._record(schema, namespace, depth)
            case "enum" | "fixed" as kind:
                return self._leaf(schema, kind, namespace)
            case "array" | "map" as kind:
                inner = schema.get("items" if kind == "array" else "values")
                nodes, below, smallest = self.check(inner, namespace, depth + 1)
                if smallest == 0:
                    raise BadSchema(f"{kind} of items that may take no bytes")
                return nodes + 1, below + 1, 1
            case inner:
                nodes, below, smallest = self.check(inner, namespace, depth + 1)
                return nodes + 1, below + 1, smallest

    def _record(self, schema: dict[str, Any], namespace: str, depth: int) -> tuple[int, int, int]:
        name = self._new_name(schema, namespace)
        self._named[name] = None
        fields = schema.get("fields")
        if not isinstance(fields, list) or not all(isinstance(field, dict) for field in fields):
            raise BadSchema(f"record {name} has no list of fields")
        if len({str(field.get("name")) for field in fields}) < len(fields):
            raise BadSchema(f"record {name} has two fields of one name")
        types = [field.get("type") for field in fields]
        result = self._sum(types, name.rpartition(".")[0], depth, union=False)
        self._named[name] = result
        return result

    def _leaf(self, schema: dict[str, Any], kind: str, namespace: str) -> tuple[int, int, int]:
        name = self._new_name(schema, namespace)
        smallest = 1
        if kind == "fixed":
            smallest = schema.get("size", -1)
            if type(smallest) is not int or not 0 <= smallest <= MAX_FIXED_BYTES:
                raise BadSchema(f"fixed {name} has the size {str(smallest)[:80]}")
        self._named[name] = (1, 0, smallest)
        return 1, 0, smallest

    def _reference(self, name: str, namespace: str) -> tuple[int, int, int]:
        full = _full_name(name, namespace)
        if full not in self._named:
            raise BadSchema(f"unknown type {full[:80]!r}")
        known = self._named[full]
        if known is None:
            raise BadSchema(f"{full} contains itself")
        return known

    def _sum(
        self, types: list[Any], namespace: str, depth: int, *, union: bool
    ) -> tuple[int, int, int]:
        parts = [self.check(part, namespace, depth + 1) for part in types]
        nodes = 1 + sum(part[0] for part in parts)
        below = 1 + max((part[1] for part in parts), default=0)
        return nodes, below, 1 if union else sum(part[2] for part in parts)

    def _new_name(self, schema: dict[str, Any], namespace: str) -> str:
        """Returns the full name of a type that the schema defines."""
        name, own = schema.get("name"), schema.get("namespace", namespace)
        if not isinstance(name, str) or not isinstance(own, str) or not name:
            raise BadSchema("a named type has no name")
        full = _full_name(name, own)
        if full in self._named:
            raise BadSchema(f"{full} is defined twice")
        return full


def _full_name(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"
