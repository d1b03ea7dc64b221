"""What can go wrong between an event and its bytes. Imports nothing, so that `--help` is quick."""

from __future__ import annotations


class DecodeError(ValueError):
    """A record's bytes are not an event of its topic. Keeps the bytes, for the dead letter."""

    def __init__(self, reason: str, value: bytes | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


class UnknownSchema(DecodeError):
    """The writer's schema isn't known yet: fetch it, `add_schema` it, and decode again."""

    def __init__(self, schema_id: int, value: bytes) -> None:
        super().__init__(f"the schema with id {schema_id} is not known", value)
        self.schema_id = schema_id


class TooLarge(ValueError):
    """An event is larger than MAX_RECORD_BYTES: what is large belongs into the blob store."""
