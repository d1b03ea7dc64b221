"""Describes a namespace as an AsyncAPI document, from the tables of the topics and events.

The document follows the AsyncAPI specification 3.0.0 and its Kafka bindings 0.5.0. It takes the
view of Headrace: `send` is a topic that Headrace writes and every team may read, and `receive` is a
topic that other teams write.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from headrace.schemas.codec import avsc
from headrace.schemas.events import Event
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import (
    ACTIONS,
    OBSERVATIONS,
    RETENTION_MS,
    NamespaceTopic,
    Topics,
)
from headrace.services.namespace.apply import topic_configuration
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.asyncapi.example_events import examples_of
from headrace.services.operate.asyncapi.security_schemes import security_schemes, servers

BINDING = "0.5.0"
"""Version of the Kafka bindings."""
AVRO = "application/vnd.apache.avro;version=1.9.0"
"""Format of the schemas."""
ANY_TEAM = "any team"
"""The writer, in the table of topics, of a topic that other teams write."""
DESCRIPTION = """Topics of one run of Headrace, for teams that submit tasks, score, or read.

- A value is the byte 0, the id of its Avro schema in the registry (4 bytes, big-endian), and the
  Avro body. The subject of a topic is its name with `-value`. It stays backward compatible.
- If two records of a topic have the same id (the header `ce_id`), readers use the first one. Three
  exceptions: of a policy version the last record counts, a trajectory counts only if the outcome
  that counts names it, and a second task of the same id ends as refused.
- All topics with the key "task" use Kafka's default partitioner, so the events of a task have the
  same partition number in all topics with equally many partitions.
- Readers use `isolation.level=read_committed`, because some topics are written in transactions.
- Packed fields are little-endian values of 4 bytes; the schemas say which. The topic `turns` has
  the same numbers as arrays.
- Examples of payloads are in Avro's JSON encoding."""
CLOUD_EVENTS = {
    "ce_specversion": "Version of CloudEvents: `1.0`.",
    "ce_source": "The process that wrote the record.",
    "ce_type": "`headrace.` and the name of the event.",
    "ce_id": "The id of the event. If two records have the same id, readers use the first one.",
    "content-type": "Media type of the value.",
    "traceparent": "W3C trace context. An event has that of the event which caused it.",
}
CONNECT = {
    "topic": "Topic of the record that could not be decoded.",
    "partition": "Its partition.",
    "offset": "Its offset.",
    "connector.name": "The process that could not decode it.",
    "stage": "`VALUE_CONVERTER`.",
    "exception.message": "Why it could not be decoded.",
}


def contract_document(topics: Topics, recipe: Recipe, cluster: ClusterConfig) -> dict[str, Any]:
    """Returns the AsyncAPI document of a namespace, as JSON values.

    It has the servers and the security schemes of `cluster`, if that names a broker, and no secret.
    """
    events = {one.topic.event for one in topics if one.topic.event is not None}
    messages = {event.__name__: _message(event) for event in sorted(events, key=_name)}
    schemes = security_schemes(cluster.broker_properties())
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"Headrace: {topics.namespace}",
            "version": version("headrace"),
            "description": DESCRIPTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/avro",
        "servers": servers(cluster, schemes),
        "channels": {_channel_id(one): _channel(one) for one in topics},
        "operations": dict(_operations(topics, recipe)),
        "components": {
            "messages": messages | {"DeadLetter": _dead_letter()},
            "messageTraits": {"CloudEvent": {"headers": _headers(CLOUD_EVENTS)}},
            "securitySchemes": schemes,
        },
    }


def _name(event: type[Event]) -> str:
    return event.__name__


def _summary(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _headers(meanings: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": text} for name, text in meanings.items()
        },
    }


def _message(event: type[Event]) -> dict[str, Any]:
    name = event.__name__
    message: dict[str, Any] = {
        "name": name,
        "title": name,
        "summary": _summary(event.__doc__ or ""),
        "contentType": "application/avro",
        "traits": [{"$ref": "#/components/messageTraits/CloudEvent"}],
        "payload": {"schemaFormat": AVRO, "schema": avsc(event)},
        "bindings": {
            "kafka": {
                "key": {
                    "type": "string",
                    "description": f"UTF-8: {_joined(event.key_fields)}",
                },
                "schemaIdLocation": "payload",
                "schemaIdPayloadEncoding": "confluent",
                "schemaLookupStrategy": "TopicNameStrategy",
                "bindingVersion": BINDING,
            }
        },
        "x-id": _joined(event.id_fields),
    }
    examples = examples_of(event)
    return message | ({"examples": examples} if examples else {})


def _joined(fields: tuple[str, ...]) -> str:
    return "/".join(f"{{{name}}}" for name in fields)


def _dead_letter() -> dict[str, Any]:
    headers = {f"__connect.errors.{name}": text for name, text in CONNECT.items()}
    return {
        "name": "DeadLetter",
        "title": "DeadLetter",
        "summary": "A record that could not be decoded, with its key, value and headers.",
        "contentType": "application/octet-stream",
        "headers": _headers(headers),
        "payload": {"description": "The bytes of the original record."},
        "bindings": {"kafka": {"key": {"type": "string"}, "bindingVersion": BINDING}},
    }


def _channel_id(one: NamespaceTopic) -> str:
    return one.topic.name if one.policy is None else f"{one.topic.name}_{one.policy}"


def _message_name(one: NamespaceTopic) -> str:
    return "DeadLetter" if one.topic.event is None else one.topic.event.__name__


def _channel(one: NamespaceTopic) -> dict[str, Any]:
    name, settings = _message_name(one), topic_configuration(one.topic)
    of_policy = "" if one.policy is None else f" of the policy {one.policy}"
    event = one.topic.event
    what = "Records that could not be decoded." if event is None else _summary(event.__doc__ or "")
    channel = {
        "address": one.name,
        "title": f"{one.topic.name}{of_policy}",
        "description": what,
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        "bindings": {
            "kafka": {
                "topic": one.name,
                "partitions": one.partitions,
                "topicConfiguration": {
                    "cleanup.policy": [settings["cleanup.policy"]],
                    "retention.ms": int(settings["retention.ms"]),
                    "retention.bytes": int(settings["retention.bytes"]),
                    "max.message.bytes": int(settings["max.message.bytes"]),
                },
                "bindingVersion": BINDING,
            }
        },
        "x-owner": one.topic.writer,
        "x-retention-ms": RETENTION_MS[one.topic.kept],
    }
    return channel if event is None else channel | {"x-subject": one.subject}


def _operations(topics: Topics, recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yields the id and the description of each operation."""
    judges = [key for key, one in recipe.environments.items() if one.external]
    for one in topics:
        if one.topic.writer == ANY_TEAM:
            yield _operation("receive", one, "Every team may write it.")
        else:
            text = f"Headrace writes it ({one.topic.writer}), and every team may read it."
            identifier, operation = _operation("send", one, text)
            if judges and one.topic.name == ACTIONS.name:
                operation["reply"] = {"channel": {"$ref": f"#/channels/{OBSERVATIONS.name}"}}
            yield identifier, operation
        if judges and one.topic.name == OBSERVATIONS.name:
            text = (
                f"The teams that run {', '.join(judges)} answer the actions of these environments, "
                "in the partition that has the number of the action's."
            )
            yield _operation("receive", one, text)


def _operation(action: str, one: NamespaceTopic, text: str) -> tuple[str, dict[str, Any]]:
    channel, name = _channel_id(one), _message_name(one)
    return f"{action}_{channel}", {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "summary": text,
        "messages": [{"$ref": f"#/channels/{channel}/messages/{name}"}],
        "bindings": {"kafka": {"bindingVersion": BINDING}},
    }
