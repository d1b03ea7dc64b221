"""What Headrace asks of a schema registry."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod

from headrace.schemas.codec import Codec, avsc
from headrace.schemas.topics import Topics

COMPATIBILITY = "BACKWARD_TRANSITIVE"
"""A new schema reads what any earlier one wrote: the log keeps its records for long."""


class SchemaRegistry(ABC):
    """Gives schemas their ids. Blocks: in a service call it through `asyncio.to_thread`."""

    @abstractmethod
    def register(self, subject: str, avsc_text: str, compatibility: str = COMPATIBILITY) -> int:
        """The id of a schema under a subject, whose compatibility level is set too. Idempotent.

        UsageError where the schema is not compatible with the subject's earlier ones, or is none;
        DependencyError where the registry is out of reach.
        """

    @abstractmethod
    def lookup(self, subject: str, avsc_text: str) -> int | None:
        """The id of a schema that is registered under a subject; None where it is not."""

    @abstractmethod
    def schema(self, schema_id: int) -> str | None:
        """The Avro schema with an id; None where there is none, or it is not Avro."""

    def prepare(self, codec: Codec, topics: Topics) -> None:
        """Registers the schemas of all topics where they aren't yet, and tells the codec the ids.

        Raises as `register` does.
        """
        for placed in topics:
            if placed.topic.event is None:
                continue
            text = json.dumps(avsc(placed.topic.event))
            schema_id = self.lookup(placed.subject, text)
            if schema_id is None:
                schema_id = self.register(placed.subject, text)
            codec.register(placed.topic.event, schema_id)
