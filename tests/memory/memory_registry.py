"""A schema registry in memory, for simulation and unit tests. It does not check compatibility."""

from __future__ import annotations

import json

from headrace.errors import UsageError
from headrace.services.kafka.schema_registry import SchemaRegistry


class MemoryRegistry(SchemaRegistry):
    """Ids count from 1; equal schemas share one, whatever their subject."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._subjects: dict[str, set[int]] = {}

    def register(self, subject: str, avsc_text: str) -> int:
        """As SchemaRegistry has it, but only text that is no JSON is refused."""
        try:
            json.loads(avsc_text)
        except ValueError as error:
            raise UsageError(f"subject {subject}: the schema is not JSON: {error}") from error
        schema_id = self._ids.setdefault(avsc_text, len(self._ids) + 1)
        self._subjects.setdefault(subject, set()).add(schema_id)
        return schema_id

    def lookup(self, subject: str, avsc_text: str) -> int | None:
        """As SchemaRegistry has it."""
        schema_id = self._ids.get(avsc_text)
        return schema_id if schema_id in self._subjects.get(subject, ()) else None

    def schema(self, schema_id: int) -> str | None:
        """As SchemaRegistry has it."""
        return next((text for text, known in self._ids.items() if known == schema_id), None)
