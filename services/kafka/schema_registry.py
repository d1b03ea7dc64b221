"""What Headrace requires of a schema registry."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from headrace.schemas.codec import Codec, avsc
from headrace.schemas.topics import Topics

COMPATIBILITY = "BACKWARD_TRANSITIVE"
"""A new schema must read what all earlier ones wrote, because the log keeps records for long."""


class SchemaRegistry(ABC):
    """Assigns ids to schemas. Blocks: in a service, call it through `asyncio.to_thread`."""

    @abstractmethod
    def register(self, subject: str, avsc_text: str) -> int:
        """Registers a schema under a subject, and returns the schema's id. Idempotent.

        Sets the subject's compatibility level to COMPATIBILITY.

        Raises UsageError if the schema is invalid or not compatible with the subject's earlier
        ones, and DependencyError if the registry does not answer.
        """

    @abstractmethod
    def lookup(self, subject: str, avsc_text: str) -> int | None:
        """The id of a schema that is registered under a subject, or None."""

    @abstractmethod
    def schema(self, schema_id: int) -> str | None:
        """The Avro schema with an id. None if there is none, or it is not Avro."""

    def prepare(self, codec: Codec, topics: Topics) -> None:
        """Registers the schemas of all topics that are not registered, and their ids in the codec.

        Raises the same errors as `register`.
        """
        for topic in topics:
            if topic.topic.event is None:
                continue
            text = json.dumps(avsc(topic.topic.event))
            schema_id = self.lookup(topic.subject, text)
            if schema_id is None:
                schema_id = self.register(topic.subject, text)
            codec.register(topic.topic.event, schema_id)
