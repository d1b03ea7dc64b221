"""What a record becomes in `dead-letters`: itself, with Kafka Connect's headers for its origin and
the reason.

Other programs may write larger records than Headrace may, and even larger ones if they compress
them. Such a record is left out of its dead letter, which then says only where it lies.
"""

from __future__ import annotations

from headrace.services.kafka.broker import MAX_MESSAGE_BYTES, Outgoing, Record

WHY = "__connect.errors."
"""Prefix of Kafka Connect's headers for a dead letter's origin and reason."""
MAX_KEPT_HEADERS = 500
"""A record with more headers is left out of its dead letter."""


def dead_letter_of(record: Record, reason: str, reader: str, topic: str) -> Outgoing:
    """Returns the dead letter of a record that `reader` could not decode, for `topic`."""
    origin = {
        "topic": record.partition.topic,
        "partition": str(record.partition.number),
        "offset": str(record.offset),
        "connector.name": reader,
        "stage": "VALUE_CONVERTER",
        "exception.message": reason,
    }
    headers = [(f"{WHY}{name}", text.encode()) for name, text in origin.items()]
    whole = Outgoing(topic, record.key or b"", record.value or b"", [*record.headers, *headers])
    if len(record.headers) <= MAX_KEPT_HEADERS and whole.size <= MAX_MESSAGE_BYTES:
        return whole
    return Outgoing(topic, b"", b"", headers)
